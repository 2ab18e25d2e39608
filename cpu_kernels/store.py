"""Write blocks of tokens into a body's arrays in place, in one call for all arrays and rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from cpu_kernels.library import STORE_BLOCKS, unavailable


def store_blocks(
    stored: Sequence[Array],
    blocks: Sequence[Array],
    first: Int[Array, "B"],
    count: Int[Array, "B"],
    *,
    axes: Sequence[int],
    entries: Sequence[int],
) -> list[Array]:
    """Return the stored arrays [B, ..., S, ...] with blocks first[b] .. first[b] + count[b] - 1 of
    row b replaced by its leading new ones.

    What would lie behind the end of an array is left out: where S is not a multiple of a block, the
    rest of its last block. A row with first[b] < 0 is left as it is. Nothing else is copied if XLA
    lets results take the memory of `stored`, as it does for donated caches.

    Args:
        stored: the arrays of a body.
        blocks: for each array, new blocks [B, ..., W, ...] of the same dtype.
        first: the first block of each row.
        count: how many blocks each row replaces.
        axes: for each array, which axis S is.
        entries: for each array, how many entries of that axis a block has.

    Raises ValueError if the library is missing. Arrays that do not fit together are an XLA error
    when the call runs.
    """
    if reason := unavailable():
        raise ValueError(reason)
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in stored]
    aliases = {2 + i: i for i in range(len(results))}
    call = jax.ffi.ffi_call(
        STORE_BLOCKS, results, vmap_method="sequential", input_output_aliases=aliases
    )
    numbers = {"axes": np.asarray(axes, np.int64), "entries": np.asarray(entries, np.int64)}
    return list(call(first.astype(np.int32), count.astype(np.int32), *stored, *blocks, **numbers))
