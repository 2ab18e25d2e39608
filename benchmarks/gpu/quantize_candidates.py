"""Quantizing and packing bf16 rows, as the kernel benchmark times it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.cpu.timing import Shape
from benchmarks.gpu.attention_candidates import Planned, Task, name_of
from benchmarks.gpu.device_timing import first, uniform
from benchmarks.gpu.random_bodies import Body, plan_of
from kvq_jax.arrays import grouped_array
from pallas_kernels.launch import Launch
from pallas_kernels.quantize.kernel import quantize_rows
from pallas_kernels.readers.grouped import GroupedReader

SCHEMES = ("sym", "hybrid", "asym")
QUANTIZE_BITS = 2


def quantize_tasks(shape: Shape, launches: Sequence[Launch]) -> list[Planned]:
    """Return the tasks of quantizing keys (groups over channels) and values (over tokens), in each
    scheme at the same magnitude bits."""
    return [
        Planned(
            "quantize",
            f"{scheme}, {side}",
            functools.partial(_quantize, shape, side, scheme, tuple(launches)),
        )
        for side in ("keys", "values")
        for scheme in SCHEMES
    ]


def _quantize(shape: Shape, which: str, scheme: Any, launches: Sequence[Launch]) -> Task:
    spec = f"innerq:bits={QUANTIZE_BITS},mode={scheme}"
    plan = plan_of(spec, shape)
    body = Body(plan.k if which == "keys" else plan.v, shape)
    format, reader = body.leaves.format, body.reader
    assert isinstance(reader, GroupedReader)
    size = (1, shape.kv_heads, shape.tokens, shape.head_dim)
    rows_bytes = 2 * shape.kv_heads * shape.tokens * shape.head_dim

    def kernel(launch: Launch, _: Array, rows: Array) -> Any:
        return quantize_rows(rows, reader, scheme, QUANTIZE_BITS, launch=launch)

    def check(_: Array, rows: Array, out: Any) -> tuple[Array, Array]:
        """Return some rows, quantized here and by the reference and dequantized: all as one row,
        for single codes may differ at ties."""
        tokens = min(shape.tokens, 1024)
        quantized = grouped_array.GroupedArray(out.words, out.scale, out.zero, format)
        cut = jax.tree.map(lambda a: a[:1, :2], quantized)
        wanted = grouped_array.quantize(rows[:1, :2, :tokens].astype(jnp.float32), format)
        return grouped_array.dequantize(cut)[:, :, :tokens].reshape(
            1, -1
        ), grouped_array.dequantize(wanted).reshape(1, -1)

    return Task(
        False,
        rows_bytes + body.nbytes,
        rows_bytes,
        body.nbytes,
        start=lambda: jnp.zeros((), jnp.float32),
        copy=lambda seed: uniform(size, seed, -1.0, 1.0, jnp.bfloat16),
        calls=tuple(
            (name_of(launch), jax.jit(functools.partial(kernel, launch))) for launch in launches
        ),
        feed=lambda x, out: x + first(out.scale),
        check=check,
    )
