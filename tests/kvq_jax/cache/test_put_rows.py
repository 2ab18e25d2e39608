"""One new token enters a ring as its row alone, by XLA for GPUs and by the C++ kernel: the ring is
one made anew, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.attention import dispatch, native
from kvq_jax.attention.dispatch import XLA
from kvq_jax.cache.update import _refresh, put_rows
from kvq_jax.layer.regions import Regions

REGIONS = Regions(sink=3, recent=5, block=8, capacity=64)
# in the sink, the ring's first slot, its last ones, and around again
STARTS = np.array([0, 2, 3, 10, 15, 16, 40], np.int32)
PUT = [put_rows, *([native.put_rows] if dispatch.no_device("native") is None else [])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, len(STARTS)])
@pytest.mark.parametrize("put", PUT)
def test_the_ring_is_that_of_a_whole_update(put, batch: int, dtype: str):
    rng, start = np.random.default_rng(0), jnp.asarray(STARTS[-batch:])
    total = start + jnp.asarray(np.arange(batch) != batch - 2, jnp.int32)  # one row takes no token
    slots, rows = (
        jnp.asarray(rng.normal(size=(batch, 2, n, 4)), dtype) for n in (REGIONS.ring_slots, 1)
    )
    held = REGIONS.ring_positions(total)
    wanted = jax.jit(_refresh, static_argnums=5)(slots, rows, held, start, total, XLA)
    found = jax.jit(put)(slots, rows, (held >= start[:, None]) & (held < total[:, None]))
    np.testing.assert_array_equal(found, wanted)
    changed = np.asarray((found != slots).any(axis=(1, 3)).sum(axis=1))
    np.testing.assert_array_equal(changed, total > start, err_msg="slots that were written, by row")
    assert batch == 1 or sorted(set(changed)) == [0, 1]
