"""Fetch arrays whose parts several processes hold."""

from __future__ import annotations

import jax
import numpy as np
from jax.typing import ArrayLike


def fetched(array: ArrayLike) -> np.ndarray:
    """Return a whole array on the host, contiguous. If several processes hold parts of it, all of
    them must call this, and each gets the whole array."""
    if (
        isinstance(array, jax.Array)
        and not array.is_fully_addressable
        and not array.is_fully_replicated
    ):
        from jax.experimental import multihost_utils  # here, as it takes time to import

        return multihost_utils.process_allgather(array, tiled=True)
    return np.ascontiguousarray(array).reshape(np.shape(array))
