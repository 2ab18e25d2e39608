"""Lower a kernel for CUDA on a host without a GPU, which shows that Triton accepts it in any
supported version of JAX, and skip tests of a route that this version lacks."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from pallas_kernels.mosaic import route

needs_mosaic = pytest.mark.skipif(bool(route.missing()), reason=route.missing() or "")


@contextlib.contextmanager
def cuda_lowering() -> Iterator[None]:
    """Lower code for an H200 without having one. JAX 0.11 and later ask for the device that they
    lower for.
    """
    if jax.__version_info__ < (0, 11):
        yield
        return
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    with (
        use_abstract_mesh(
            AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))
        ),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*[Tt]riton.*", category=DeprecationWarning)
        yield


def lower_for_cuda(function: Callable, *args: Any) -> str:
    """Return the StableHLO of a function of arrays or ShapeDtypeStructs, including its kernels."""
    shapes = jax.eval_shape(lambda *args: args, *args)
    with cuda_lowering():
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
