"""Arrays in memory of huge pages, which a CPU reads faster.

A decode step reads every weight once, and most of a model's weights are smaller than a huge page.
So they lie behind each other in common blocks. A block is freed when the last of its arrays is.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import jax
import numpy as np
from jax.typing import DTypeLike

BLOCK = 1 << 25  # bytes that are asked for at a time
_ALIGNMENT = 64  # XLA takes arrays of this alignment as they are
_SUPPORTED = hasattr(mmap, "MADV_HUGEPAGE")
_lock = threading.Lock()
_block: np.ndarray = np.empty(0, np.uint8)  # the rest of the newest


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return an array in huge pages, if the system has them. Its values are arbitrary."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize * math.prod(shape)
    return _taken(size).view(dtype).reshape(shape) if _SUPPORTED else np.empty(shape, dtype)


def placed(array: np.ndarray) -> jax.Array:
    """Return the array on the default device. A CPU uses the same memory: do not write to the array
    any more."""
    return jax.device_put(array, may_alias=True)


def _taken(size: int) -> np.ndarray:
    global _block
    room = -(-size // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if room > _block.size:
            fresh = mmap.mmap(-1, max(room, BLOCK), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                fresh.madvise(mmap.MADV_HUGEPAGE)
            _block = np.frombuffer(fresh, np.uint8)
        taken, _block = _block[:size], _block[room:]
    return taken
