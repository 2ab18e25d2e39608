"""KVQuant's kernels: decode attention, and what Table 22 of its paper times, the parts of reading nuq4-1% keys and values of LLaMA-2-7B by
themselves, at batch 1.

Exact fp16 rows (keys after RoPE), packing, the dense codes, the outliers, and codes and outliers together. Keys are cached before RoPE, and
rotated while they are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks.common import Shape
from benchmarks.device_timing import first, random_words, scattered, uniform
from benchmarks.kernel_candidates import (
    CHECKED_HEADS,
    Planned,
    Task,
    attention_task,
    bytes_of,
    codecs_of,
    compared,
    leaves_of,
    name_of,
    padded_heads,
    side_of,
)
from kvq_jax.body import load_body
from kvq_jax.methods.kvquant.codec import KVQuantCodec
from kvq_jax.nonuniform import Nonuniform
from kvq_jax.outliers import Outliers
from kvq_jax.rope import Rope
from pallas_kernels import matvec
from pallas_kernels._launch import Launch
from pallas_kernels.codebook import Codebook
from pallas_kernels.decode import decode_attention
from pallas_kernels.outliers import outlier_scores, outlier_values, turn
from pallas_kernels.rotary import Rotated

SPEC = "kvquant:bits=4,outliers=0.01"
ATTENTION_SPECS = ("kvquant:bits=3,outliers=0.01", SPEC)
MODEL = "Llama-2-7B"
PARTS = ("fp16", "packing", "dense", "sparse", "total")
SECTIONS = {"k": "kvquant keys", "v": "kvquant values"}
BLOCK = 32  # tokens that are packed together
SCORES_TUNING = dataclasses.replace(matvec.SCORES_TUNING, tile=32)
VALUES_TUNING = dataclasses.replace(matvec.SCORES_TUNING, stages=2)


def rope_of(head_dim: int) -> Rope:
    exponents = jnp.arange(head_dim // 2, dtype=jnp.float32) / (head_dim // 2)
    return Rope(10000.0**-exponents, jnp.ones((), jnp.float32))


def random_parameters(codec: Any, heads: int, seed: Array) -> dict[str, Array]:
    """Such that rows are about -1 .. 1, and hardly an outlier."""
    ranges = {"levels": (-1, 1), "qnorm": (0, 0), "scale": (0.7, 1.3), "zero": (-0.1, 0.1), "lower": (-9, -8), "upper": (8, 9)}
    found = {name: uniform(struct.shape, seed, *ranges[name]) for name, struct in codec.parameters(heads).items()}
    if "levels" in found:
        found |= {"levels": jnp.sort(found["levels"]), "qnorm": jnp.asarray([1.0, 0.0])}
    return found


def random_nonuniform(leaves: Nonuniform, width: int, seed: Array) -> Nonuniform:
    """Arrays as a cache stores them; all slots of outliers are in use."""
    words = tuple(random_words(words.shape, seed + jnp.uint32(1000 * i)) for i, words in enumerate(leaves.words))

    def random(leaf: Any, offset: int, low: float, high: float) -> Array:
        return leaf.store(uniform(leaf.shape, seed + jnp.uint32(offset), low, high, leaf.dtype))

    scale, zero = (None, None) if leaves.scale is None else (random(leaves.scale, 2000, 0.7, 1.3), random(leaves.zero, 3000, -0.1, 0.1))
    sparse = None
    if leaves.outliers is not None:
        index, residual = leaves.outliers.index, leaves.outliers.residual
        slot = jnp.arange(index.shape[1])[None, :, None]  # one in each of as many runs of channels: sorted, and no channel twice
        begin, end = (n * width // index.shape[1] for n in (slot, slot + 1))
        place = begin + (scattered(index.shape, seed + jnp.uint32(4000)) % (end - begin).astype(jnp.uint32)).astype(jnp.int32)
        dropped = None if leaves.outliers.dropped is None else jnp.zeros(leaves.outliers.dropped.shape, jnp.uint8)
        sparse = Outliers(place.astype(jnp.uint16), random(residual, 5000, -3.0, 3.0), dropped)
    return Nonuniform(words, scale, zero, sparse, leaves.format)


def table_tasks(shape: Shape, hows: Sequence[Launch]) -> list[Planned]:
    """Keys, then values: a candidate for each column of the paper's table."""
    return [
        Planned(section, part, functools.partial(_task, shape, side, part, tuple(hows)))
        for side, section in SECTIONS.items()
        for part in PARTS
    ]


def total_of_keys(shape: Shape, hows: tuple[Launch, ...]) -> Task:
    """q K^T over codes and outliers together."""
    return _task(shape, "k", "total", hows)


def _task(shape: Shape, side: str, part: str, hows: tuple[Launch, ...]) -> Task:
    made = _Side(shape, side)
    if part == "fp16":
        return made.task(True, made.rows_bytes, lambda seed: made.random_rows(seed, shape.tokens), made.exact, made.precise, ())
    if part == "packing":
        return made.packing()
    return made.task(False, made.bytes(part), made.copy, functools.partial(made.call, part), functools.partial(made.wanted, part), hows)


@dataclasses.dataclass(frozen=True)
class _Side:
    """Keys or values. A copy is (parameters, stored body); x are the queries, or the weights in fp16."""

    shape: Shape
    side: str

    @property
    def codec(self) -> KVQuantCodec:
        codec = codecs_of(SPEC, self.shape)["kv".index(self.side)]
        assert isinstance(codec, KVQuantCodec)
        return codec

    @property
    def leaves(self) -> Nonuniform:
        return leaves_of(self.codec, self.shape)

    @property
    def rows_bytes(self) -> int:
        return 2 * self.shape.kv_heads * self.shape.tokens * self.shape.head_dim

    def bytes(self, part: str) -> int:
        sparse = bytes_of(self.leaves.outliers)
        return {"dense": bytes_of(self.leaves) - sparse, "sparse": sparse, "total": bytes_of(self.leaves)}[part]

    def copy(self, seed: Array) -> Any:
        width = self.shape.kv_heads * self.shape.head_dim
        return random_parameters(self.codec, self.shape.kv_heads, seed), random_nonuniform(self.leaves, width, seed)

    def random_rows(self, seed: Array, tokens: int) -> Array:
        return uniform((1, self.shape.kv_heads, tokens, self.shape.head_dim), seed, -1.0, 1.0, jnp.float16)

    def task(
        self, bf16: bool, size: int, copy: Callable, call: Callable[..., Array], wanted: Callable[..., Array], hows: tuple[Launch, ...]
    ) -> Task:
        shape, keys = self.shape, self.side == "k"
        last = shape.head_dim if keys else shape.tokens
        calls = [(name_of(how), functools.partial(call, how)) for how in hows] or [("", functools.partial(call, None))]

        def start() -> Array:
            low, dtype = (-3.0, jnp.float32) if keys else (0.0, jnp.float16)
            return uniform((1, shape.kv_heads, 1, last), jnp.uint32(17), low, 1.0, dtype)

        return Task(
            bf16,
            size,
            size,
            0,
            start=start,
            copy=copy,
            calls=tuple((name, jax.jit(function)) for name, function in calls),
            feed=lambda x, out: x.at[0, 0, 0, 0].add(first(out).astype(x.dtype)),
            check=lambda x, copy, out: (out, wanted(None, x, copy)),
        )

    def exact(self, _: Launch | None, x: Array, rows: Array) -> Array:
        if self.side == "k":
            return jnp.einsum("bkgh,bksh->bkgs", x.astype(rows.dtype), rows, preferred_element_type=jnp.float32)
        return jnp.einsum("bkgs,bksh->bkgh", padded_heads(x), rows, preferred_element_type=jnp.float32)[:, :, :1]

    def precise(self, _: Launch | None, x: Array, rows: Array) -> Array:
        formula = "bkgh,bksh->bkgs" if self.side == "k" else "bkgs,bksh->bkgh"
        return jnp.einsum(formula, x.astype(jnp.float32), rows.astype(jnp.float32), precision="highest")

    def packing(self) -> Task:
        """A block of tokens that leaves the window."""
        codec, tokens = self.codec, BLOCK

        def start() -> Any:
            return self.random_rows(jnp.uint32(3), tokens)

        def pack(x: Array, params: Any) -> Any:
            return codec.encode(params, (), x, prefill=False)

        def same(_: Any, params: Any, out: Any) -> tuple[Array, Array]:
            rows = codec.decode(params, (), out).reshape(1, -1)
            return rows, rows  # XLA packs in every path: there is nothing to compare with

        size = bytes_of(codec.body(1, self.shape.kv_heads, tokens)) + 2 * self.shape.kv_heads * tokens * self.shape.head_dim
        return Task(
            False,
            size,
            size,
            0,
            start=start,
            copy=lambda seed: random_parameters(codec, self.shape.kv_heads, seed),
            calls=(("", pack),),
            feed=lambda x, out: x + first(out.words[0]).astype(x.dtype),
            check=same,
        )

    def call(self, part: str, how: Launch, x: Array, copy: Any) -> Array:
        params, body = copy
        index, residual = (getattr(body.outliers, name) for name in ("index", "residual"))
        limits, rope = jnp.full((1,), self.shape.tokens), rope_of(self.shape.head_dim)
        if part == "sparse" and self.side == "v":
            return outlier_values(x.astype(jnp.float32), index, residual, limits, self.shape.head_dim)
        if part == "sparse":
            turned = turn(rope.inverse_frequencies, 0, self.shape.tokens)
            return outlier_scores(x, index, residual, limits, turned, how)
        side, arrays = side_of(self.codec, self.leaves), self.codec.kernel_arrays(params, body)
        inner = side.inner if isinstance(side, Rotated) else side
        assert isinstance(inner, Codebook)
        if part == "dense":
            inner, arrays = dataclasses.replace(inner, outliers=0), arrays[:-2]
        if not isinstance(side, Rotated):
            return matvec.weighted_values(x, inner, arrays, tuning=VALUES_TUNING, how=how)
        side, arrays = dataclasses.replace(side, inner=inner), [*arrays, rope.inverse_frequencies, rope.attention_factor]
        return matvec.scores(x, side, arrays, capacity=self.shape.tokens, tuning=SCORES_TUNING, how=how)

    def wanted(self, part: str, _: Launch | None, x: Array, copy: Any) -> Float[Array, "B K G X"]:
        params, stored = copy
        body = load_body(self.leaves, stored)
        without = dataclasses.replace(body, outliers=dataclasses.replace(body.outliers, residual=jnp.zeros_like(body.outliers.residual)))
        all_rows, dense = (self.codec.decode(params, (), b) for b in (body, without))
        rows = {"total": all_rows, "dense": dense, "sparse": all_rows - dense}[part]
        rows = self.codec.vectors(params, rows, jnp.arange(self.shape.tokens)[None], rope_of(self.shape.head_dim))
        return self.precise(None, x, rows)


# Decode attention


def attention_tasks(shape: Shape, hows: Sequence[Launch], specs: Sequence[str]) -> list[Planned]:
    return [Planned("attention", spec, functools.partial(_fused, shape, spec, tuple(hows))) for spec in specs]


def _fused(shape: Shape, spec: str, hows: tuple[Launch, ...]) -> Task:
    """Our kernel, over everything that a cache of this spec would hold in its body. A copy is ((parameters, body) of keys, of values)."""
    codecs = codecs_of(spec, shape)
    leaves = tuple(leaves_of(codec, shape) for codec in codecs)
    sides = [side_of(codec, body) for codec, body in zip(codecs, leaves, strict=True)]
    rope, width = rope_of(shape.head_dim), shape.kv_heads * shape.head_dim

    def copy(seed: Array) -> Any:
        seeds = (seed * 2 + jnp.uint32(i) for i in range(2))
        return tuple(
            (random_parameters(codec, shape.kv_heads, seed), random_nonuniform(body, width, seed))
            for codec, body, seed in zip(codecs, leaves, seeds, strict=True)
        )

    def call(how: Launch, x: tuple[Array, Array], copy: Any) -> Array:
        k, v = (codec.kernel_arrays(*stored) for codec, stored in zip(codecs, copy, strict=True))
        if isinstance(sides[0], Rotated):
            k = [*k, rope.inverse_frequencies, rope.attention_factor]
        part = decode_attention(x[0], (sides[0], k), (sides[1], v), x[1], capacity=shape.tokens, how=how)
        return part.o / jnp.maximum(part.l, 1e-30)

    def check(x: tuple[Array, Array], copy: Any, out: Array) -> tuple[Array, Array]:
        rows = []
        for codec, body, (params, stored) in zip(codecs, leaves, copy, strict=True):
            one = jax.tree.map(lambda array: array[:1], load_body(body, stored))
            rows.append(codec.vectors(params, codec.decode(params, (), one), jnp.arange(shape.tokens)[None], rope)[:, :CHECKED_HEADS])
        return compared(x[0], rows, out)

    return attention_task(
        shape,
        False,
        bytes_of(leaves),
        copy=copy,
        calls=tuple((name_of(how), jax.jit(functools.partial(call, how))) for how in hows),
        check=check,
        idle=lambda x: (x[0], jnp.zeros_like(x[1])),
    )
