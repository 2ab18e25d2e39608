"""The compiled kernels that read and write a codec's body, as one value with builders by format.

`kernel_readers` and `kernel_writers` describe a format to the GPU kernels, `native_bodies` to the
C++ kernels. Those modules import a kernel only if it is asked for, so `Kernels` holds functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.arrays.grouped_array import GroupFormat, Scheme
from kvq_jax.codecs import kernel_readers, native_bodies
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.kernel_writers import KernelWriter
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.types.array_types import Tree

# (statistics of the values, sums) -> weights . v
Sum: TypeAlias = Callable[[Tree, Float[Array, "B K R H"]], Float[Array, "B K R H"]]


class KernelJob(NamedTuple):
    """The work of the quantization kernel: rows in uniform groups, first divided by `divisor`
    [B, K, 1, H] if there is one."""

    format: GroupFormat
    scheme: Scheme
    divisor: Float[Array, "B K 1 H"] | None


def _leaves(params: Tree, body: Tree) -> list[Array]:
    return jax.tree.leaves(body)


def by_xla(params: Tree, stats: Tree, prefill: bool) -> None:
    """Leave quantization to XLA."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The compiled kernels that read and write a body.

    reader: () -> the reader of the fused GPU kernels, or one line that says why there is none.
    native: () -> the description for the C++ kernels, or one line that says why there is none.
    arrays: (params, body) -> the arrays that both read, in their order.
    writer: (params, stats, prefill) -> the quantizer of blocks on a GPU. A `KernelJob` serves
        prompts and steps, a `KernelWriter` steps alone. None leaves it to XLA.
    sum: turns the sum over the body's stored numbers into weights . v, by a linear map. None if the
        sum is weights . v already, so that kernels may add vectors of the windows.
    """

    reader: Callable[[], Reader | str]
    native: Callable[[], Body | str]
    arrays: Callable[[Tree, Tree], list[Array]] = _leaves
    writer: Callable[[Tree, Tree, bool], KernelJob | KernelWriter | None] = by_xla
    sum: Sum | None = None

    def summed(self, stats: Tree, weighted: Float[Array, "B K R H"]) -> Float[Array, "B K R H"]:
        """Return weights . v from the sums of the kernels."""
        return weighted if self.sum is None else self.sum(stats, weighted)


def unserved(gpu: str, cpu: str | None = None) -> Kernels:
    """Return the kernels of a format that none serves, with the reason in one line each."""
    return Kernels(lambda: gpu, lambda: cpu or gpu)


def of_rows(channels: int, dtype: str) -> Kernels:
    """Return the kernels of rows in full precision."""
    return Kernels(
        functools.partial(kernel_readers.dense, channels, dtype),
        functools.partial(native_bodies.rows, channels, dtype),
    )


def of_groups(format: GroupFormat, *, pre_rope: bool) -> Kernels:
    """Return the kernels of uniform groups, written by the job of their own scheme."""

    def writer(params: Tree, stats: Tree, prefill: bool) -> KernelJob | None:
        # The kernel quantizes one head at a time.
        return None if format.heads > 1 else KernelJob(format, format.scheme, None)

    return Kernels(
        functools.partial(kernel_readers.grouped, format, pre_rope=pre_rope),
        functools.partial(native_bodies.grouped, format, pre_rope=pre_rope),
        writer=writer,
    )


def of_codebook(
    format: CodebookFormat,
    arrays: Callable[[Tree, Tree], list[Array]],
    writer: Callable[[Tree, Tree, bool], KernelWriter | None],
    *,
    pre_rope: bool,
) -> Kernels:
    """Return the kernels of codes that index one table."""
    options = {
        "scale_dtype": format.scale_dtype,
        "pool": format.pool.tokens if format.pool else 0,
        "pre_rope": pre_rope,
    }
    layout, group = format.layout, format.group
    return Kernels(
        functools.partial(kernel_readers.codebook, layout, group, **options),
        functools.partial(
            native_bodies.codebook, layout, group, residual_dtype=format.residual_dtype, **options
        ),
        arrays,
        writer,
    )


def table_of(levels: tuple[float, ...]) -> Float[Array, " entries"]:
    """Return a fixed codebook as kernels and codecs read it, fp32."""
    return jnp.asarray(levels, jnp.float32)
