"""Find what interpreted kernels on Pallas' Triton route read or write outside of their arrays
without a mask. The interpreter clamps such indices, and a GPU does not. (Mosaic GPU's interpreter
refuses them by itself.)

    pytest -p tests.pallas_kernels.bounds tests/pallas_kernels       fails each test that does so
"""

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.state import discharge  # JAX does not export the rules of its interpreter


class Outside(list[str]):
    """What was outside, in words, and how many accesses were checked."""

    checked: int = 0

    def check(self, what: str, shape: Sequence[int], starts: Any, sizes: Sequence[int]) -> None:
        """Check an access when it runs."""

        def report(*starts: Any) -> None:
            self.checked += 1
            for axis, (start, size, maximum) in enumerate(zip(starts, sizes, shape, strict=False)):
                start = np.asarray(start)
                if start.size and not 0 <= start.min() <= start.max() <= maximum - size:
                    self.append(
                        f"{what}: {size} from {start.min()} .. {start.max()} on, axis {axis} of"
                        f" {tuple(shape)}"
                    )

        jax.debug.callback(report, *map(jnp.asarray, starts))


@contextlib.contextmanager
def watched() -> Iterator[Outside]:
    """Collect accesses outside of arrays by kernels that are traced and run inside."""
    outside, real, convert = Outside(), discharge.lax_slicing, discharge._convert_to_gather_arrays

    def dynamic_slice(x: Any, starts: Any, sizes: Any) -> Any:
        outside.check("read", x.shape, starts, sizes)
        return real.dynamic_slice(x, starts, sizes)

    def dynamic_update_slice(x: Any, value: Any, starts: Any) -> Any:
        outside.check("write", x.shape, starts, value.shape)
        return real.dynamic_update_slice(x, value, starts)

    def convert_to_gather_arrays(indexer: Any) -> Any:
        arrays = convert(indexer)
        outside.check("read or write", indexer.shape, arrays, [1] * len(arrays))
        return arrays

    slicing = {"dynamic_slice": dynamic_slice, "dynamic_update_slice": dynamic_update_slice}
    with mock.patch.multiple(
        discharge,
        lax_slicing=types.SimpleNamespace(**vars(real) | slicing),
        _convert_to_gather_arrays=convert_to_gather_arrays,
    ):
        yield outside
        jax.effects_barrier()


@pytest.fixture(autouse=True)
def _in_bounds() -> Iterator[None]:
    """Fail a test whose kernels leave their arrays, if this module is a plugin."""
    jax.clear_caches()
    with watched() as outside:
        yield
    assert not outside, "\n".join(dict.fromkeys(outside))
