"""The candidates of the KVQuant paper's Table 22: the parts of reading nuq4-1% keys and values of
LLaMA-2-7B by themselves, at batch 1.

Exact fp16 rows (keys after RoPE), packing, the dense codes, the outliers, and codes and outliers
together. Keys are cached before RoPE, and rotated while they are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import kvq_jax as kvq
from benchmarks.cpu.timing import Shape
from benchmarks.gpu.attention_candidates import Planned, Task, name_of, padded_heads
from benchmarks.gpu.device_timing import first, nudged, uniform
from benchmarks.gpu.random_bodies import Body, plan_of, random_parameters, rope_of
from kvq_jax.arrays.codebook_array import CodebookArray
from kvq_jax.arrays.stored import load_body
from kvq_jax.codecs.codec import Codec, TokensAt
from kvq_jax.codecs.learning import for_kernels
from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.readers.sparse_outliers import outlier_scores
from pallas_kernels.readers.turn import turn
from pallas_kernels.tiles.layout import SPAN

SPEC = "kvquant:bits=4,outliers=0.01"
MODEL = "Llama-2-7B"
PARTS = ("fp16", "packing", "dense", "sparse", "total")
SECTIONS = {"k": "kvquant keys", "v": "kvquant values"}
BLOCK = 32  # tokens that are packed together
SCORES_TUNING = Tuning(tile=32)
VALUES_TUNING = Tuning(tile=64, stages=2)


def table_tasks(shape: Shape, launches: Sequence[Launch]) -> list[Planned]:
    """Return the tasks of keys, then of values: a candidate for each column of the paper's
    table."""
    return [
        Planned(section, part, functools.partial(_task, shape, side, part, tuple(launches)))
        for side, section in SECTIONS.items()
        for part in PARTS
    ]


def total_of_keys(shape: Shape, launches: tuple[Launch, ...]) -> Task:
    """Make the task of q K^T over codes and outliers together."""
    return _task(shape, "k", "total", launches)


def _task(shape: Shape, side: str, part: str, launches: tuple[Launch, ...]) -> Task:
    packed = _Side(shape, side)
    if part == "fp16":
        return packed.task(
            True,
            packed.rows_bytes,
            lambda seed: packed.random_rows(seed, shape.tokens),
            packed.exact,
            packed.precise,
            (),
        )
    if part == "packing":
        return packed.packing()
    size, call, wanted = (
        packed.bytes(part),
        functools.partial(packed.call, part),
        functools.partial(packed.wanted, part),
    )
    return packed.task(False, size, packed.body.copy, call, wanted, launches)


@dataclasses.dataclass(frozen=True)
class _Side:
    """Keys or values. A copy is (parameters, stored body); x are the queries, or the weights in
    fp16."""

    shape: Shape
    side: str

    @property
    def codec(self) -> Codec:
        plan = plan_of(SPEC, self.shape)
        return plan.k if self.side == "k" else plan.v

    @property
    def body(self) -> Body:
        return Body(self.codec, self.shape)

    @property
    def leaves(self) -> CodebookArray:
        return self.body.leaves

    @property
    def rows_bytes(self) -> int:
        return 2 * self.shape.kv_heads * self.shape.tokens * self.shape.head_dim

    @property
    def token_bytes(self) -> int:
        """Count the bytes of the scores that a call writes, fp32, or of the weights that it reads,
        fp16."""
        return (4 if self.side == "k" else 2) * self.shape.kv_heads * self.shape.tokens

    def bytes(self, part: str) -> int:
        sparse = kvq.size.nbytes(self.leaves.outliers)
        return {
            "dense": kvq.size.nbytes(self.leaves) - sparse,
            "sparse": sparse,
            "total": kvq.size.nbytes(self.leaves),
        }[part]

    def random_rows(self, seed: Array, tokens: int) -> Array:
        return uniform(
            (1, self.shape.kv_heads, tokens, self.shape.head_dim), seed, -1.0, 1.0, jnp.float16
        )

    def task(
        self,
        bf16: bool,
        size: int,
        copy: Callable,
        call: Callable[..., Array],
        wanted: Callable[..., Array],
        launches: tuple[Launch, ...],
    ) -> Task:
        shape, keys = self.shape, self.side == "k"
        last = shape.head_dim if keys else shape.tokens
        calls = [(name_of(launch), functools.partial(call, launch)) for launch in launches] or [
            ("", functools.partial(call, None))
        ]

        def start() -> Array:
            low, dtype = (-3.0, jnp.float32) if keys else (0.0, jnp.float16)
            return uniform((1, shape.kv_heads, 1, last), jnp.uint32(17), low, 1.0, dtype)

        return Task(
            bf16,
            size + self.token_bytes,
            size,
            0,
            start=start,
            copy=copy,
            calls=tuple((name, jax.jit(function)) for name, function in calls),
            feed=nudged,
            check=lambda x, copy, out: (out, wanted(None, x, copy)),
        )

    def exact(self, _: Launch | None, x: Array, rows: Array) -> Array:
        if self.side == "k":
            return jnp.einsum(
                "bkgh,bksh->bkgs", x.astype(rows.dtype), rows, preferred_element_type=jnp.float32
            )
        return jnp.einsum(
            "bkgs,bksh->bkgh", padded_heads(x), rows, preferred_element_type=jnp.float32
        )[:, :, :1]

    def precise(self, _: Launch | None, x: Array, rows: Array) -> Array:
        formula = "bkgh,bksh->bkgs" if self.side == "k" else "bkgs,bksh->bkgh"
        return jnp.einsum(
            formula, x.astype(jnp.float32), rows.astype(jnp.float32), precision="highest"
        )

    def packing(self) -> Task:
        """Make the task of packing a block that leaves the window. XLA packs in every path, so
        there is nothing to compare with."""
        codec, tokens = self.codec, BLOCK

        def start() -> Any:
            return self.random_rows(jnp.uint32(3), tokens)

        def pack(x: Array, params: Any) -> Any:
            at = TokensAt(jnp.zeros((1, tokens), jnp.int32), prefill=False)
            return codec.quantize(params, (), x, at)

        size = (
            kvq.size.nbytes(codec.body(1, self.shape.kv_heads, tokens))
            + 2 * self.shape.kv_heads * tokens * self.shape.head_dim
        )
        return Task(
            False,
            size,
            size,
            0,
            start=start,
            copy=lambda seed: random_parameters(codec, self.shape.kv_heads, seed),
            calls=(("", pack),),
            feed=lambda x, out: x + first(out.words[0]).astype(x.dtype),
            check=None,
        )

    def call(self, part: str, launch: Launch, x: Array, copy: Any) -> Array:
        params, body = copy
        reader, arrays = self.body.reader, self.codec.kernels.arrays(for_kernels(params), body)
        rope = rope_of(self.shape.head_dim)
        if part == "sparse" and self.side == "v":
            return matvec.weighted_outliers(x, reader, arrays, launch=launch)
        if part == "sparse":
            limits, turned = (
                jnp.full((1,), self.shape.tokens),
                turn(rope.inverse_frequencies, SPAN * jnp.arange(self.shape.tokens // SPAN)),
            )
            index, residual, ends = arrays[-3:]
            return outlier_scores(
                x, index, residual, ends, limits, turned, launch, BLOCK, x.shape[2]
            )
        inner = reader.inner if isinstance(reader, RotatedReader) else reader
        assert isinstance(inner, CodebookReader)
        if part == "dense":
            inner, arrays = dataclasses.replace(inner, pool=0), arrays[:-3]
        if not isinstance(reader, RotatedReader):
            return matvec.weighted_values(x, inner, arrays, tuning=VALUES_TUNING, launch=launch)
        reader, arrays = (
            dataclasses.replace(reader, inner=inner),
            [
                *arrays,
                rope.inverse_frequencies,
                rope.attention_factor,
            ],
        )
        return matvec.scores(
            x, reader, arrays, capacity=self.shape.tokens, tuning=SCORES_TUNING, launch=launch
        )

    def wanted(self, part: str, _: Launch | None, x: Array, copy: Any) -> Float[Array, "B K G X"]:
        params, stored = copy
        body = load_body(self.leaves, stored)
        without = dataclasses.replace(
            body,
            outliers=dataclasses.replace(
                body.outliers, residual=jnp.zeros_like(body.outliers.residual)
            ),
        )
        all_rows, dense = (self.codec.dequantize(params, (), b) for b in (body, without))
        rows = {"total": all_rows, "dense": dense, "sparse": all_rows - dense}[part]
        rows = self.codec.vectors(
            params, rows, jnp.arange(self.shape.tokens)[None], rope_of(self.shape.head_dim)
        )
        return self.precise(None, x, rows)
