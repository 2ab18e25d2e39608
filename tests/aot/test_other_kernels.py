"""Kernels without a loop over the cache compile for both GPUs. Limits are on their registers, not
on their instructions.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.sass import assemble, loops
from benchmarks.machine_code.target import A100, H200, Target
from kvq_jax.arrays import uniform
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.codecs.kernel_readers import grouped
from pallas_kernels.decode_attention import outlier_values
from pallas_kernels.decode_attention.merge import merged_output
from pallas_kernels.decode_attention.partial_attention import Splits
from pallas_kernels.decode_attention.schedule import Pieces, Schedule
from pallas_kernels.decode_attention.windows import WindowQueries
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.quantize.append import Places, Side, append_token
from pallas_kernels.quantize.kernel import quantize_rows
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.sparse_outliers import outlier_scores
from pallas_kernels.readers.turn import turn

on_both_gpus = pytest.mark.parametrize("target", [H200, A100], ids=lambda target: target.name)
# each GPU and each arithmetic once: a kernel of both takes seconds of a core for each
on_either = pytest.mark.parametrize(
    ("target", "arithmetic"), [(H200, "asm"), (A100, "jnp")], ids=["h200", "a100"]
)


@on_either
@pytest.mark.parametrize(
    ("scheme", "axis", "max_spills"),
    [("asym", "channels", 64), ("hybrid", "channels", 160), ("hybrid", "tokens", 64)],
)
def test_the_quantizer_compiles_within_its_registers(scheme, axis, max_spills, arithmetic, target):
    bits = 2
    reader = grouped(GroupFormat(bits, scheme, axis, 32, 128, 32))
    assert isinstance(reader, GroupedReader)
    rows = jax.ShapeDtypeStruct((2, 8, 1024, 128), jnp.bfloat16)
    program = compile_for(
        target,
        lambda rows: quantize_rows(rows, reader, scheme, bits, launch=Launch(arithmetic)),
        (rows,),
    )
    kernel = program.kernel(f"quantize_{scheme}_{axis}")
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    assert assembly.spill_bytes <= max_spills, (
        f"{assembly.registers} registers, {assembly.spill_bytes} bytes spilled"
    )
    assert 32 < assembly.registers <= 255


@on_either
@pytest.mark.parametrize(("sink", "channels"), [(0, 128), (32, 64), (32, 128), (1, 256)])
@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "before_rope"])
def test_attention_to_windows_compiles_within_its_registers(
    rotates, sink, channels, arithmetic, target
):
    q = jax.ShapeDtypeStruct((16, 8, 4, channels), jnp.bfloat16)
    windows = [
        tuple(jax.ShapeDtypeStruct((16, 8, slots, channels), jnp.bfloat16) for _ in "kv")
        for slots in (sink, 128)
    ]
    row = jax.ShapeDtypeStruct((16,), jnp.int32)
    rotation = (
        tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((channels // 2,), ()))
        if rotates
        else None
    )

    def attend(rotation, q, sink, ring, tokens, limits):
        sides = [
            Side(keys[:, :, :1], first, keys, None) for first, keys in zip(sink, ring, strict=True)
        ]
        places = Places(tokens, tokens > 0, tokens, tokens, tokens > 0)
        return append_token(
            sides,
            places,
            block=1,
            queries=WindowQueries(q, tokens, limits, rotation),
            launch=Launch(arithmetic),
        )

    program = compile_for(target, attend, (rotation, q, *windows, row, row))
    kernel = program.kernel("append_token")
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    assert assembly.spill_bytes == 0, (
        f"{assembly.registers} registers, {assembly.spill_bytes} bytes spilled"
    )
    assert kernel.shared_bytes <= 101376, (
        f"{kernel.shared_bytes} bytes: more than a block may have where multiprocessors have 100 KB"
    )


@on_either
@pytest.mark.parametrize("batch", [1, 64])
def test_pieces_are_merged_within_registers(batch, arithmetic, target):
    schedule, row = (
        Schedule(8 * target.cores, 128, batch, 8),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )

    def arrays(*leading: int) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct((*leading, *rest), jnp.float32) for rest in ((4,), (4,), (128, 4))
        ]

    def merge(
        windows: Splits, body: list[jax.Array], limits: jax.Array, positions: jax.Array
    ) -> jax.Array:
        parts = [windows, Pieces(*body, limits, schedule)]
        return merged_output(
            parts, 4, positions, capacity=4096, dtype=jnp.bfloat16, launch=Launch(arithmetic)
        )

    program = compile_for(
        target, merge, (Splits(*arrays(batch, 8, 1)), arrays(schedule.pieces), row, row)
    )
    kernel = program.kernel("finish_attention")
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    assert assembly.spill_bytes == 0
    assert assembly.registers <= 128, "a multiprocessor holds four programs at least"


def spills_of_outlier_scores(target: Target, turned: bool, registers: int | None = None) -> int:
    """Return the spilled bytes for pools of 32 tokens with 12 slots each and four query heads, with
    at most this many registers per thread.
    """
    q, positions = (
        jax.ShapeDtypeStruct((2, 8, 4, 128), jnp.float32),
        jax.ShapeDtypeStruct((64,), jnp.float32),
    )
    slots, ends = (jax.ShapeDtypeStruct((2, 128, n), jnp.uint16) for n in (384, 8))
    limits = jax.ShapeDtypeStruct((2,), jnp.int32)

    def scores(q, index, residual, ends, limits, frequencies):
        return outlier_scores(
            q,
            index,
            residual,
            ends,
            limits,
            turn(frequencies, 5 + 32 * jnp.arange(128)) if turned else None,
            LAUNCH,
            32,
            4,
        )

    kernel = compile_for(target, scores, (q, slots, slots, ends, limits, positions)).kernel(
        "outlier_scores"
    )
    assert kernel.threads == 32, "a warp for each head of a pool"
    ptx = (
        kernel.ptx
        if registers is None
        else re.sub(
            r"(?=^\.(?:req|max)ntid)", f".maxnreg {registers}\n", kernel.ptx, flags=re.MULTILINE
        )
    )
    return assemble(ptx, kernel.name, target.architecture).spill_bytes


@on_both_gpus
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "before_rope"])
def test_scores_of_outliers_are_kept_in_registers(turned, target):
    assert spills_of_outlier_scores(target, turned) == 0


@on_both_gpus
@pytest.mark.parametrize(("group", "channels", "maximum"), [(4, 128, 0), (1, 64, 0), (8, 256, 3)])
def test_sums_of_outliers_are_kept_in_registers(group, channels, maximum, target):
    """most: spills of a step, some with the most query heads for a head dim of 256. A share's place
    may also be spilled.
    """
    tuning, slots = (
        outlier_values.tuning_for(group),
        jax.ShapeDtypeStruct((2, 128, 384), jnp.uint16),
    )
    scores, ends = (
        jax.ShapeDtypeStruct((2, 8, group, 4096), jnp.float32),
        jax.ShapeDtypeStruct((2, 128, 8), jnp.uint16),
    )

    def values(scores, index, residual, ends, limits):
        return outlier_values.outlier_values(
            scores, index, residual, ends, limits, channels, launch=LAUNCH
        ).o

    kernel = compile_for(
        target, values, (scores, slots, slots, ends, jax.ShapeDtypeStruct((2,), jnp.int32))
    ).kernel("outlier_values")
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    step = min(
        (loop for loop in loops(assembly.function) if loop.multiply_adds),
        key=lambda loop: len(loop.indices),
    )
    assert step.multiply_adds == 128 * group * max(channels, 128), "not a step of 128 slots"
    assert step.counts().get("spill", 0) <= maximum
    assert assembly.spill_bytes <= 64 + 32 * maximum
    if target == H200:
        assert assembly.registers * kernel.threads * tuning.resident <= 65536, (
            "fewer programs run at a time than share the tiles"
        )


def test_spills_of_a_kernel_with_too_few_registers_are_counted():
    """Negative control: the kernels above would fail if they spilled."""
    assert spills_of_outlier_scores(H200, turned=True, registers=16) > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_scale_is_rounded_before_codes_are_computed(dtype):
    """XLA drops a conversion that is undone in the same program."""
    rows = jax.ShapeDtypeStruct((64, 32), jnp.float32)

    def widened(x: jax.Array) -> jax.Array:
        return x.astype(dtype).astype(jnp.float32) * 3

    def program(function: Callable[..., Any]) -> str:
        return compile_for(H200, function, (rows,)).compiled.as_text()

    for quantizer in (uniform.asymmetric, uniform.symmetric, uniform.hybrid):
        text = program(functools.partial(quantizer, bits=2, axis=1, dtype=jnp.dtype(dtype)))
        assert "reduce-precision" in text, quantizer.__name__
    assert " convert(" not in program(widened), "XLA keeps conversions: nothing is shown"
