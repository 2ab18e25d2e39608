"""The one place that calls the kernels that Triton compiles.

They are written in Pallas, and load, unpack and multiply sub-byte codes on Ampere, Ada and Hopper.
Triton's parameters are always passed, because they also select the route: the default changed
between JAX 0.10 and 0.12.

Kernels are traced without 64-bit types, whatever jax_enable_x64 says: they hold none, and the
Python integers of their loops and divisions would become int64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Launch


class _Triton:
    """Pallas' Triton, imported at its first use: kernels on Mosaic GPU share modules with it, and
    need none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("jax.experimental.pallas.triton"), name)


plt: Any = _Triton()


def has_triton() -> bool:
    """Return True if this JAX has Pallas' Triton route."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    launch: Launch,
    num_warps: int,
    num_stages: int,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Call `pl.pallas_call` with Triton's parameters, and a name for profiles and dumps.

    Args:
        aliases: {input: output} whose memory the output takes over, contents included.
    """
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        input_output_aliases=dict(aliases or {}),
        interpret=launch.interpret,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )

    def in_32_bits(*arrays: jax.Array) -> Any:
        with jax.enable_x64(False):
            return call(*arrays)

    return in_32_bits


def whole_array_but(
    axes: int, array: jax.Array | jax.ShapeDtypeStruct, grid_axes: Sequence[int]
) -> pl.BlockSpec:
    """Return the block that fixes the first `axes` axes of an array at program ids (grid_axes[i]
    for axis i, which may be 1 long) and leaves the rest whole.

    Nothing is copied: a Triton block is a pointer, and a kernel loads only what it indexes.
    """

    def index(*ids: Any) -> tuple[Any, ...]:
        fixed = (0 if array.shape[i] == 1 else ids[grid_axes[i]] for i in range(axes))
        return (*fixed, *[0] * (array.ndim - axes))

    return pl.BlockSpec((*[None] * axes, *array.shape[axes:]), index)
