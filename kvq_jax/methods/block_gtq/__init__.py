"""Block-GTQ: RoPE pairs with more bits if queries and keys are large there, in groups of one width
that are rotated, normalized and rounded as TurboQuant does."""

from kvq_jax.methods.block_gtq.method import BlockGTQ

__all__ = ["BlockGTQ"]
