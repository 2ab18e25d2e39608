"""Registers and spills of a step's other kernels on Mosaic GPU: appending a token, outliers,
merging, and quantizing a prompt.

Compiled on any machine for a GPU that is not there. Needs the extra `aot` and JAX 0.11 or later. A
process compiles for one GPU, as in routes.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kvq_jax as kvq
from benchmarks.llama_8b import llama_config
from benchmarks.machine_code import case
from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.launches import calibrated
from benchmarks.machine_code.sass import assemble
from benchmarks.machine_code.stored import pools_of, tables
from benchmarks.machine_code.target import BY_NAME, H200, Target
from benchmarks.machine_code.tools import missing
from benchmarks.markdown import table
from benchmarks.progress import progress
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.attention.fused import block_writer
from kvq_jax.layer.plan import LayerPlan
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.merge import merged_output
from pallas_kernels.decode_attention.partial_attention import Splits
from pallas_kernels.decode_attention.schedule import Pieces, Schedule
from pallas_kernels.decode_attention.windows import WindowQueries
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from pallas_kernels.quantize.append import Blocks, Places, Side, append_token
from pallas_kernels.quantize.blocks import GroupedBlocks
from pallas_kernels.quantize.kernel import quantize_rows

BATCH, TOKENS, HEADS, GROUP, CHANNELS = 16, 4096, 8, 4, 128
LAUNCH = Launch("asm", route="mosaic")
# (function, its arguments, which of them are updated in place)
Built = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class StepKernel:
    """A kernel, the most bytes that it may spill, and the most registers that it may take."""

    name: str
    kernel: str
    build: Callable[[], Built]
    cap_spill_bytes: int = 0
    cap_registers: int = 255


def _struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _plan(spec: str) -> LayerPlan:
    return kvq.cache.layout(spec, llama_config(1), BATCH, TOKENS, "bfloat16").plans[0]


def appending(spec: str) -> Built:
    """Append a token to both sides, attend to the windows, and quantize the block that leaves."""
    plan = _plan(spec)
    regions = plan.regions
    bodies = [
        [
            _struct(*x.shape, dtype=x.dtype)
            for x in jax.tree.leaves(codec.body(BATCH, HEADS, TOKENS))
        ]
        for codec in plan.codecs
    ]
    new, sink, ring = (
        [_struct(BATCH, HEADS, slots, CHANNELS)] * 2
        for slots in (1, regions.sink, regions.ring_slots)
    )
    numbers, rotation = _struct(BATCH, dtype=jnp.int32), None
    if plan.k.facts.form == "before_rope":
        rotation = tuple(_struct(*shape, dtype=jnp.float32) for shape in ((CHANNELS // 2,), ()))

    def append(
        bodies: Any, sinks: Any, rings: Any, rows: Any, at: Any, asked: Any, params: Any
    ) -> Any:
        sides, (q, rotation) = [], asked
        for i, (codec, body) in enumerate(zip(plan.codecs, bodies, strict=True)):
            stats = codec.statistics.initial(BATCH, HEADS)
            writer = block_writer(plan, codec, params[i], stats, LAUNCH)
            assert writer is not None, "no kernel writes this format"
            sides.append(Side(rows[i], sinks[i], rings[i], Blocks(body, *writer)))
        places, queries = Places(at, at > 0, at, at, at > 1), WindowQueries(q, at, at, rotation)
        after, parts = append_token(
            sides, places, block=regions.block, queries=queries, launch=LAUNCH
        )
        return [(side.sink, side.ring, _body(side)) for side in after], parts

    q = _struct(BATCH, HEADS, GROUP, CHANNELS)
    asked = q, rotation
    return append, (bodies, sink, ring, new, numbers, asked, calibrated(plan)), (0, 1, 2)


def _body(side: Side) -> Any:
    return side.blocks.body if isinstance(side.blocks, Blocks) else None


def merging() -> Built:
    """Merge the pieces of the body and the windows."""
    schedule = Schedule(264, 256, BATCH, HEADS)

    def of(*leading: int) -> list[jax.ShapeDtypeStruct]:
        rest = (GROUP,), (GROUP,), (CHANNELS, GROUP)
        return [_struct(*leading, *shape, dtype=jnp.float32) for shape in rest]

    def merge(window: Any, pieces: Any, limits: Any, positions: Any) -> Any:
        parts = [Splits(*window), Pieces(*pieces, limits=limits, schedule=schedule)]
        return merged_output(
            parts, GROUP, positions, capacity=TOKENS, dtype=jnp.bfloat16, launch=LAUNCH
        )

    numbers = _struct(BATCH, dtype=jnp.int32)
    return merge, (of(BATCH, HEADS, 1), of(schedule.pieces), numbers, numbers), ()


def quantizing(spec: str, side: int) -> Built:
    """Quantize a prompt's rows."""
    plan = _plan(spec)
    codec = plan.codecs[side]

    def quantize(rows: Any, params: Any) -> Any:
        stats = codec.statistics.initial(1, HEADS)
        writer = block_writer(plan, codec, params, stats, LAUNCH)
        assert writer is not None
        assert isinstance(writer.blocks, GroupedBlocks)
        job = writer.blocks.job
        divisor = next(iter(writer.inputs), None)
        return quantize_rows(rows, job.reader, job.scheme, job.bits, divisor=divisor, launch=LAUNCH)

    return quantize, (_struct(1, HEADS, TOKENS, CHANNELS), calibrated(plan)[side]), ()


def attending(name: str) -> Built:
    """Attend to tables with outliers on one side, so that no kernel is compiled twice."""
    readers, stored = [], []
    group = ChannelGroup(case.KV_HEADS, CHANNELS)
    of_keys, of_values = pools_of(1, CHANNELS)
    for reader, arrays, _ in (
        tables(4, CHANNELS, None, of_keys if name == "scores" else None, pre_rope=True),
        tables(4, CHANNELS, group, of_values if name == "values" else None),
    ):
        readers.append(reader)
        stored.append(arrays)

    def attend(q: Any, keys: Any, values: Any, limits: Any) -> Any:
        sides = (readers[0], keys), (readers[1], values)
        return decode_attention(q, *sides, limits, capacity=case.TOKENS, launch=LAUNCH)

    q = _struct(case.BATCH, case.KV_HEADS, GROUP, CHANNELS)
    return attend, (q, *stored, _struct(case.BATCH, dtype=jnp.int32)), ()


KERNELS = (
    *(
        StepKernel(
            f"append, {spec}",
            "append_token_mosaic_gpu_kernel",
            lambda s=spec: appending(s),
            cap_spill_bytes=64,
        )
        for spec in (
            "kivi:bits=4",
            "kivi:bits=2",
            "innerq:bits=2",
            "nf4",
            "kivi:bits=4,pre_rope=true",
            "polarquant",
            "kvquant:bits=3",
            "kvquant:bits=4",
        )
    ),
    StepKernel("merge", "merge_mosaic_gpu_kernel", merging),
    # at least four blocks on a multiprocessor, to wait for what they gather
    *(
        StepKernel(
            f"outliers, {name}",
            f"outlier_{name}_mosaic_gpu_kernel",
            lambda name=name: attending(name),
            cap_registers=128,
        )
        for name in ("scores", "values")
    ),
    *(
        StepKernel(
            f"quantize, {spec}, {'kv'[side]}",
            "quantize_mosaic_gpu_kernel",
            lambda s=spec, i=side: quantizing(s, i),
            cap_spill_bytes=64,
        )
        for spec, side in (("kivi:bits=4", 0), ("innerq:bits=2", 1))
    ),
)


def measure(kernel: StepKernel, target: Target) -> tuple[tuple[str, ...], list[str]]:
    """Return a line of the table, and the limits that the kernel breaks."""
    function, arguments, updated = kernel.build()
    program = compile_for(target, jax.jit(function, donate_argnums=updated), arguments)
    compiled = program.kernel(kernel.kernel)
    assembly = assemble(compiled.ptx, compiled.name, target.architecture)
    memory = program.compiled.memory_analysis()
    assert memory is not None
    in_place = kvq.size.nbytes([arguments[i] for i in updated])
    failures = []
    cap = kernel.cap_spill_bytes
    if assembly.spill_bytes > cap:
        failures.append(f"{assembly.spill_bytes} bytes spilled, at most {cap}")
    if assembly.registers > kernel.cap_registers:
        failures.append(f"{assembly.registers} registers, at most {kernel.cap_registers}")
    if memory.alias_size_in_bytes < in_place:
        failures.append(f"{memory.alias_size_in_bytes} of {in_place} bytes stay in their place")
    count = len(assembly.function.instructions)
    numbers = assembly.registers, assembly.spill_bytes, count
    line = (kernel.name, target.name, *map(str, numbers))
    return line, [f"{kernel.name} on {target.name}: {failure}" for failure in failures]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table. The exit status is 1 if a kernel breaks its limits, 2 if nothing can be
    compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine_code.mosaic_step",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("--case", default="", help="only kernels whose name contains this")
    parser.add_argument(
        "--target", choices=BY_NAME, default=H200.name, help="the GPU (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if lacking := missing() or route.missing():
        parser.exit(2, f"{lacking}\n")
    lines, failures = [], []
    for kernel in KERNELS:
        if args.case in kernel.name:
            line, broken = measure(kernel, BY_NAME[args.target])
            lines.append(line)
            failures += broken
            progress(" | ".join(line))
    print(table(("kernel", "GPU", "registers", "bytes spilled", "instructions"), lines))
    if failures:
        parser.exit(1, "\n".join(["limits broken:", *failures, ""]))


if __name__ == "__main__":
    main()
