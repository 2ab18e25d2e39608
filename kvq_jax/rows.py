"""Shorten, select, repeat and join the rows of caches, and move caches between devices."""

from kvq_jax.cache.moving import move
from kvq_jax.cache.row_operations import merge_rows as merge
from kvq_jax.cache.row_operations import repeat_rows as repeat
from kvq_jax.cache.row_operations import replace_row as replace
from kvq_jax.cache.row_operations import select_rows as select
from kvq_jax.cache.row_operations import trim

__all__ = ["merge", "move", "repeat", "replace", "select", "trim"]
