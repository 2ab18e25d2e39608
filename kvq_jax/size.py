"""Count what caches store: bytes, bits for each element, tokens in the body, outliers, and what
they cannot hold."""

import sys
import types
import warnings
from typing import Any

from kvq_jax.cache.accounting import (
    OutlierTotals,
    bits_per_element,
    body_bits_per_element,
    components,
    dense_nbytes,
    dropped_outliers,
    nbytes,
    outlier_fraction,
    outlier_totals,
    quantized_tokens,
    unmet_options,
)
from kvq_jax.cache.overflow import Overflow, overflowed
from kvq_jax.cache.size import Size
from kvq_jax.cache.size import size as of

__all__ = [
    "OutlierTotals",
    "Overflow",
    "Size",
    "bits_per_element",
    "body_bits_per_element",
    "components",
    "dense_nbytes",
    "dropped_outliers",
    "nbytes",
    "of",
    "outlier_fraction",
    "outlier_totals",
    "overflowed",
    "quantized_tokens",
    "unmet_options",
]


class _CallableModule(types.ModuleType):
    """`kvq_jax.size(...)` was a function until release 0.1."""

    def __call__(self, *args: Any, **kwargs: Any) -> Size:
        warnings.warn(
            "kvq_jax.size(...) is now kvq_jax.size.of(...)", DeprecationWarning, stacklevel=2
        )
        return of(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
