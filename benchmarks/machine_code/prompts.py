"""Count what a layer launches and writes for a prompt, compiled for a GPU that need not be here.

    python -m benchmarks.machine_code.prompts
    python -m benchmarks.machine_code.prompts --case kivi --points 32768:0 4096:28672

A point is the prompt's tokens and those that the cache holds before it. Loops count as often as
they run for these. cuDNN need not be here either: JAX is told that it is. Bytes are the results of
launches, without those that are written into a part of an array. Needs the extra `aot`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Literal
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.llama_8b import llama_config
from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.target import H200
from benchmarks.machine_code.tools import missing
from benchmarks.markdown import table
from kvq_jax.attention import cudnn, streaming
from kvq_jax.attention.dispatch import Route
from kvq_jax.cache.update import prefill_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.array_types import LayerInputs
from pallas_kernels.launch import Launch

SPECS = ("kivi:bits=4", "innerq:bits=2", "dense")
POINTS = ("32768:0", "4096:0", "4096:28672")
BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2}
NO_LAUNCH = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_HEAD = re.compile(r"(?P<entry>ENTRY )?%(?P<name>\S+) \(.*\{$")
_LINE = re.compile(r" +(ROOT )?%\S+ = (?P<shapes>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<rest>.*)")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Count:
    """launches: of one layer. written: bytes of their results. temporary: bytes of memory beside
    arguments and results."""

    launches: float
    written: float
    temporary: int


def measure(spec: str, tokens: int, older: int, by: Literal["xla", "cudnn"]) -> Count:
    """Compile a prompt's layer of Llama 3.1 8B and count.

    Args:
        spec: the cache.
        tokens: of the prompt.
        older: the tokens that the cache holds before.
        by: the code that attends to new tokens.
    """
    config = llama_config(1)
    cache = kvq.cache.layout(spec, config, 1, tokens + older + 1024, "bfloat16")
    plan = cache.plans[0]
    route = Route("pallas", Launch("asm"), prompts=by)
    step = jax.jit(functools.partial(_layer, plan, route), donate_argnums=0)
    q, k = (
        jax.ShapeDtypeStruct((1, heads, tokens, plan.head_dim), jnp.bfloat16)
        for heads in (config.num_attention_heads, plan.heads)
    )
    start = jax.ShapeDtypeStruct((1,), jnp.int32)
    with mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", return_value=91000):
        compiled = compile_for(H200, step, (cache.layers[0], q, k, k, start)).compiled
    trips = iter(_trips(plan, q, older, by))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("XLA describes neither program nor memory")
    launches, written = _Program(text, older=bool(older)).counted(trips)
    if left := list(trips):
        raise ValueError(f"the program has no loops for {left}")
    return Count(launches, written, memory.temp_size_in_bytes)


def _layer(
    plan: LayerPlan, route: Route, state: LayerState, q: Array, k: Array, v: Array, start: Array
) -> tuple[Array, LayerState]:
    tokens = q.shape[2]
    positions = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
    rope = kvq.types.Rope(jnp.ones(plan.head_dim // 2), jnp.ones(()))
    x = jnp.zeros((1, tokens, q.shape[1] * plan.head_dim), q.dtype)
    valid = jnp.ones((1, tokens), bool)
    inputs = LayerInputs(x, q, q, k, k, v, positions, valid, rope)
    return prefill_layer(plan, (), state, inputs, (), route)[:2]


def _trips(plan: LayerPlan, q: jax.ShapeDtypeStruct, older: int, by: str) -> Iterator[float]:
    """Yield how often the program's loops run, on average: over chunks of queries and, for each,
    over chunks of full-precision rows and of the body."""
    regions, chunks = plan.regions, -(-q.shape[2] // streaming.QUERY_CHUNK)
    body, size = int(regions.aged_tokens(older)), regions.held_capacity
    if by == "cudnn":
        if older:
            yield math.ceil(body / cudnn.dequantized_tokens(plan, 1, size))
        return
    yield chunks
    windows = regions.sink_slots + regions.ring_slots
    ends = ((at + 1) * streaming.QUERY_CHUNK + windows for at in range(chunks))
    yield sum(math.ceil(end / streaming.EXACT_CHUNK) for end in ends) / chunks
    rows = 1, plan.heads, q.shape[1] // plan.heads * streaming.QUERY_CHUNK, plan.head_dim
    queries = jnp.zeros(rows, q.dtype)
    yield math.ceil(body / streaming.chunk_tokens(regions.block, size, queries, plan.row_width))


class _Program:
    """The computations of an optimized program by name: (results, operation, rest) of each line."""

    def __init__(self, text: str, *, older: bool):
        self.older, self.entry = older, ""
        self.computations: dict[str, list[tuple[str, str, str]]] = {}
        lines: list[tuple[str, str, str]] = []
        for line in text.splitlines():
            if head := _HEAD.match(line):
                lines = self.computations.setdefault(head["name"], [])
                self.entry = head["name"] if head["entry"] else self.entry
            elif parts := _LINE.match(line):
                lines.append((parts["shapes"], parts["op"], parts["rest"]))

    def counted(self, trips: Iterator[float], name: str = "") -> tuple[float, float]:
        """Return (launches, bytes written) of a computation."""
        launches = written = 0.0
        for shapes, op, rest in self.computations[name or self.entry]:
            if op in NO_LAUNCH:
                continue
            times, inside = 1.0, []
            if op == "while":
                times, inside = next(trips), re.findall(r"(?:condition|body)=%([\w.-]+)", rest)
            elif op == "conditional":
                # XLA may have inverted the condition: attention to older tokens is the longer one
                branches = re.findall(r"(?:true|false)_computation=%([\w.-]+)", rest)
                branches.sort(key=lambda branch: len(self.computations[branch]))
                inside = [branches[self.older]]
            for part in inside:
                more = self.counted(trips, part)
                launches, written = launches + times * more[0], written + times * more[1]
            if not inside:
                launches, written = launches + 1, written + self._bytes(shapes, rest)
        return launches, written

    def _bytes(self, shapes: str, rest: str) -> int:
        calls = re.search(r"calls=%([\w.-]+)", rest)
        inside = self.computations[calls[1]] if calls else []
        if any(op == "dynamic-update-slice" for _, op, _ in inside):
            return 0
        sizes = [(BYTES.get(kind, 1), dims.split(",")) for kind, dims in _SHAPE.findall(shapes)]
        return sum(size * math.prod(int(n) for n in dims if n) for size, dims in sizes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine_code.prompts",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--case", metavar="REGEX", default="", help="only caches that match")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="TOKENS:OLDER")
    options = parser.parse_args(argv)
    if lacking := missing():
        parser.exit(2, f"{lacking}\n")
    lines: list[tuple[str, ...]] = []
    for spec in (spec for spec in SPECS if re.search(options.case, spec)):
        for tokens, older in (map(int, point.split(":")) for point in options.points):
            for by in ("xla", "cudnn"):
                count = measure(spec, tokens, older, by)
                sizes = f"{count.written / 1e9:.1f}", f"{count.temporary / 1e6:.0f}"
                launches = f"{count.launches:.0f}"
                lines.append((f"`{spec}`", str(tokens), str(older), by, launches, *sizes))
                print(*lines[-1], sep=", ", file=sys.stderr, flush=True)
    names = "cache", "prompt", "older", "new tokens by", "launches", "GB written", "MB beside"
    print(table(names, lines))


if __name__ == "__main__":
    main()
