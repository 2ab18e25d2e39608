"""Fetch arrays whose parts several processes hold, and let one of them write for all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

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


def in_first(write: Callable[[], object], path: str | os.PathLike[str]) -> None:
    """Call `write`, which writes `path`, in the first process, while the others wait for it.

    If it raises there, all raise, so that none waits for a process that has gone: the others raise
    OSError with the same number.
    """
    number = 0
    try:
        if jax.process_index() == 0:
            write()
    except BaseException as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise
    finally:
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils  # here, as it takes time to import

            number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    if number:
        raise OSError(number, f"{os.strerror(number)} in the process that writes", os.fspath(path))
