"""Decode attention as the kernel benchmark times it: packed and bfloat16 keys and values, ours and
others', at shapes of four models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from benchmarks.cpu.attention import one_dot_query_first
from benchmarks.cpu.timing import Shape
from benchmarks.gpu.device_timing import TINY, uniform
from benchmarks.gpu.random_bodies import CHECKED_HEADS, Body, bodies_of, checked_part
from benchmarks.gpu.report import INEXACT_MERGE
from kvq_jax.attention import reference
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.launch import Launch
from pallas_kernels.readers.dense import DenseReader

MODELS = {  # KV heads, query heads of each, head dim
    "Llama-3.2-1B": (8, 4, 64),
    "Llama-3.1-8B": (8, 4, 128),
    "Llama-2-7B": (32, 1, 128),
    "Llama-2-13B": (40, 1, 128),
}
FIRST_SPECS = ("dense", "kivi:bits=4", "kivi:bits=2", "innerq:bits=2", "innerq:bits=1,mode=sym")
SPECS = (
    *("dense", "kivi:bits=2", "kivi:bits=4", "innerq:bits=1,mode=sym"),
    *("innerq:bits=2", "innerq:bits=3,mode=sym", "innerq:bits=8,mode=asym"),
    *("kvquant:bits=3,outliers=0.01", "kvquant:bits=4,outliers=0.01"),
)
MORE_SPECS = ("kivi:bits=4,pre_rope=true", "nf4", "polarquant")  # at one shape only
DEQUANTIZED = "kivi:bits=4"  # the cache of the candidate that dequantizes before it attends
PROCESSORS = 132  # of an H200, which at least as many programs occupy


@dataclasses.dataclass(frozen=True)
class Planned:
    """A candidate by name. `make` raises ValueError if it cannot serve the shape."""

    section: str
    candidate: str
    make: Callable[[], Task]


@dataclasses.dataclass(frozen=True)
class Task:
    """A candidate at one shape, before it is compiled. All functions are traced.

    bf16: keys and values are exact.
    moved_bytes: the least that a call moves. Arrays of a copy are read once. Of products, weights
        are read and scores written too. Attention's queries and result do not count.
    copy_bytes: bytes of a copy.
    temp_bytes: bytes that a call writes besides its result.
    start: makes the loop's x.
    copy: makes the arrays of one copy from a seed.
    calls: pairs of (arithmetic, call(x, copy)).
    feed: makes the next x from x and a result.
    check: returns (output, wanted) of a part of a result, or is None if there is no reference.
    idle: returns x with nothing live, or is None.
    remark: tells readers of the row about a limitation.
    """

    bf16: bool
    moved_bytes: int
    copy_bytes: int
    temp_bytes: int
    start: Callable[[], Any]
    copy: Callable[[Array], Any]
    calls: tuple[tuple[str, Callable[[Any, Any], Any]], ...]
    feed: Callable[[Any, Any], Any]
    check: Callable[[Any, Any, Any], tuple[Array, Array]] | None
    idle: Callable[[Any], Any] | None = None
    remark: str = ""


def shape_of(model: str, tokens: int, batch: int) -> Shape:
    kv_heads, group, head_dim = MODELS[model]
    return Shape(batch, tokens, head_dim, kv_heads, group)


def name_of(launch: Launch) -> str:
    if launch.interpret:
        return "interpreted"
    return launch.arithmetic if launch.route == "triton" else launch.route


# Attention: x = (q [B, K, G, H], limits [B]), a result is [B, K, G, H], all fp32


def attention_tasks(
    shape: Shape, launches: Sequence[Launch], specs: Sequence[str] = SPECS, *, brief: bool = False
) -> list[Planned]:
    """Return the tasks of attention, others' code first. brief: of others' only XLA's and the two
    of cuDNN that are exact."""
    tasks: dict[str, Callable[[], Task]] = {
        "XLA bf16": lambda: _others(shape, _naive, "BKSH"),
        "cuDNN bf16": lambda: _others(shape, _cudnn, "BSKH"),
    }
    if shape.group > 1:
        tasks["cuDNN bf16, query heads as tokens"] = lambda: _others(shape, _cudnn_grouped, "BSKH")
    if not brief and (splits := _useful_splits(shape)) > 1:
        tasks["cuDNN bf16, tokens split"] = lambda: _others(
            shape, functools.partial(_cudnn_split, splits), "BSKH", INEXACT_MERGE
        )
    if not brief:
        tasks[f"{DEQUANTIZED}, dequantized, then XLA bf16"] = lambda: _dequantized(shape)
    tasks |= {spec: functools.partial(_fused, shape, spec, tuple(launches)) for spec in specs}
    return [Planned("attention", name, make) for name, make in tasks.items()]


def attention_task(shape: Shape, bf16: bool, moved_bytes: int, **fields: Any) -> Task:
    size = (shape.batch, shape.kv_heads, shape.group, shape.head_dim)

    def start() -> tuple[Array, Array]:
        return uniform(size, jnp.uint32(17), -3.0, 3.0), jnp.full(
            (shape.batch,), shape.tokens, jnp.int32
        )

    def feed(x: tuple[Array, Array], out: Array) -> tuple[Array, Array]:
        return x[0] + TINY * out, x[1]

    return Task(
        bf16,
        moved_bytes,
        moved_bytes,
        fields.pop("temp_bytes", 0),
        start=start,
        feed=feed,
        **fields,
    )


def compared(q: Array, rows: Iterable[Array], out: Array) -> tuple[Array, Array]:
    """Return (output, wanted) of the checked part. The rows of keys and of values are already cut
    to it."""
    k, v = rows
    q, output = checked_part((q, out))
    with jax.default_matmul_precision("highest"):
        wanted = reference.attend(
            q.reshape(1, -1, 1, q.shape[3]), k, v, jnp.ones((1, 1, k.shape[2]), bool)
        )
    return output, wanted.reshape(output.shape)


def _over(shape: Shape, bodies: tuple[Body, Body], bf16: bool, **fields: Any) -> Task:
    """Make the task of attention over stored keys and values."""
    k, v = bodies
    return attention_task(
        shape,
        bf16,
        k.nbytes + v.nbytes,
        copy=lambda seed: tuple(
            body.copy(seed * 2 + jnp.uint32(i)) for i, body in enumerate(bodies)
        ),
        check=lambda x, copy, out: compared(
            x[0], (body.checked_rows(one) for body, one in zip(bodies, copy, strict=True)), out
        ),
        **fields,
    )


def _fused(shape: Shape, spec: str, launches: Sequence[Launch]) -> Task:
    """Make the task of our kernel, over everything that a cache of this spec would hold in its
    body."""
    bodies = bodies_of(spec, shape)
    off_triton = bodies[0].reader.off_triton
    launches = [one for one in launches if one.route == "mosaic" or not off_triton]

    def call(launch: Launch, x: tuple[Array, Array], copy: Any) -> Array:
        keys, values = (
            (body.reader, body.arrays(one)) for body, one in zip(bodies, copy, strict=True)
        )
        part = decode_attention(x[0], keys, values, x[1], capacity=shape.tokens, launch=launch)
        return part.o / jnp.maximum(part.l, 1e-30)

    return _over(
        shape,
        bodies,
        all(isinstance(body.reader, DenseReader) for body in bodies),
        calls=tuple(
            (name_of(launch), jax.jit(functools.partial(call, launch))) for launch in launches
        ),
        idle=lambda x: (x[0], jnp.zeros_like(x[1])),
    )


def _dequantized(shape: Shape) -> Task:
    """Make the task that writes all rows to memory in bf16 before it attends to them."""
    bodies = bodies_of(DEQUANTIZED, shape)

    def call(x: tuple[Array, Array], copy: Any) -> Array:
        rows = (body.rows(one).astype(jnp.bfloat16) for body, one in zip(bodies, copy, strict=True))
        return _naive(x[0], *lax.optimization_barrier(tuple(rows)))

    return _over(shape, bodies, False, temp_bytes=_exact_bytes(shape), calls=(("", call),))


def _exact_bytes(shape: Shape) -> int:
    """Count the bytes of keys and values in bf16."""
    return 4 * shape.batch * shape.kv_heads * shape.tokens * shape.head_dim


def _others(shape: Shape, attend: Callable[..., Array], axes: str, remark: str = "") -> Task:
    """Make the task of unquantized bf16 keys and values with their axes in this order."""
    sizes = {"B": shape.batch, "K": shape.kv_heads, "S": shape.tokens, "H": shape.head_dim}

    def check(x: tuple[Array, Array], copy: tuple[Array, Array], out: Array) -> tuple[Array, Array]:
        if axes == "BSKH":
            return compared(x[0], (jnp.swapaxes(a[:1, :, :CHECKED_HEADS], 1, 2) for a in copy), out)
        return compared(x[0], checked_part(copy), out)

    return attention_task(
        shape,
        True,
        _exact_bytes(shape),
        copy=lambda seed: tuple(
            uniform(
                tuple(sizes[a] for a in axes), seed * 2 + jnp.uint32(i), -1.0, 1.0, jnp.bfloat16
            )
            for i in range(2)
        ),
        calls=(("", lambda x, copy: attend(x[0], *copy)),),
        check=check,
        remark=remark,
    )


def _naive(q: Array, k: Array, v: Array) -> Array:
    """Attend with one dot of all query heads of a KV head, a softmax and another dot."""
    return one_dot_query_first(
        padded_heads(q.astype(jnp.bfloat16)), k, v, jnp.asarray(k.shape[2], jnp.int32)
    )[:, :, : q.shape[2]]


def padded_heads(rows: Float[Array, "B K G X"]) -> Float[Array, "B K GP X"]:
    """Pad a single query head with zero heads: for one row XLA writes a sum of products, and
    transposes all of V for it."""
    return rows if rows.shape[2] > 1 else jnp.pad(rows, ((0, 0), (0, 0), (0, 7), (0, 0)))


def _cudnn(q: Array, k: Array, v: Array) -> Array:
    batch, heads, group, channels = q.shape
    rows = q.astype(jnp.bfloat16).reshape(batch, 1, heads * group, channels)
    return (
        jax.nn.dot_product_attention(rows, k, v, implementation="cudnn")
        .astype(jnp.float32)
        .reshape(q.shape)
    )


def _cudnn_grouped(q: Array, k: Array, v: Array) -> Array:
    """Attend with the query heads of a KV head as its tokens, so that no KV head is read twice."""
    rows = jnp.moveaxis(q.astype(jnp.bfloat16), 2, 1)  # [B, G, K, H]
    out = jax.nn.dot_product_attention(rows, k, v, implementation="cudnn")
    return jnp.moveaxis(out, 1, 2).astype(jnp.float32)


def _cudnn_split(splits: int, q: Array, k: Array, v: Array) -> Array:
    """Do the same for runs of tokens, as sequences of a larger batch, and merge them by their
    logarithms of sums. `jax.nn` gives these in the dtype of the result, so a run's weight errs by
    up to 2^-9 of its logarithm: a few percent of the result.
    """
    batch, heads, group, channels = q.shape

    def cut(rows: Array) -> Array:
        return rows.reshape(batch * splits, rows.shape[1] // splits, heads, channels)

    rows = jnp.repeat(
        jnp.moveaxis(q.astype(jnp.bfloat16), 2, 1), splits, axis=0
    )  # [B * P, G, K, H]
    out, log_sums = jax.nn.dot_product_attention(
        rows, cut(k), cut(v), implementation="cudnn", return_residual=True
    )
    weights = jax.nn.softmax(
        log_sums.astype(jnp.float32).reshape(batch, splits, group, heads), axis=1
    )
    merged = jnp.sum(
        out.astype(jnp.float32).reshape(batch, splits, group, heads, channels) * weights[..., None],
        axis=1,
    )
    return jnp.moveaxis(merged, 1, 2)


def _useful_splits(shape: Shape) -> int:
    """Return a power of two that occupies the GPU, with at least 256 tokens in each run."""
    splits = 1
    while (
        shape.batch * shape.kv_heads * splits < PROCESSORS
        and shape.tokens // (2 * splits) >= 256
        and shape.tokens % (2 * splits) == 0
    ):
        splits *= 2
    return splits
