"""What the tests of caches share: sequences, compiled layer functions, and comparisons that name
what differs.

Lengths vary inside one compiled function: every batch is ragged, and holds the lengths at which
something happens. All padding is NaN, in every test: it may never enter a number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.attention import dispatch, reference, streaming
from kvq_jax.attention.dispatch import NATIVE, XLA, Route
from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.update import append_layer, decode_layer, prefill_layer
from kvq_jax.codecs.bias_subtracting import BiasSubtracting
from kvq_jax.codecs.codec import Codec
from kvq_jax.codecs.learning import LayerTrace
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.array_types import LayerWeights
from kvq_jax.types.rope import rotate
from tests.compile_options import QUICK_COMPILE
from tests.float64 import row_errors

DIMS = CacheDims(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=128
)
CAPACITY = 90
STEP = 8  # tokens of one decode call
ROUNDING = 1e-5  # relative: how far apart two compiled functions may round fp32


def with_small_chunks(function: Callable) -> Callable:
    """`function`, traced so that short sequences already take several chunks of every loop."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.multiple(streaming, BODY_CHUNK=32, EXACT_CHUNK=48, QUERY_CHUNK=40):
            return function(*args, **kwargs)

    return traced


def quick_jit(function: Callable, **options: Any) -> Callable:
    return jax.jit(with_small_chunks(function), compiler_options=QUICK_COMPILE, **options)


def _reference(
    plan: LayerPlan,
    params: Any,
    state: LayerState,
    lengths: jax.Array,
    inputs: kvq.types.LayerInputs,
    seen: jax.Array,
    carry: Any = (),
) -> jax.Array:
    """Return the definition of attention over a layer of `lengths` tokens, for queries that see
    `seen` [B, T, S]."""
    k, v = reference.decode_vectors(plan, params, state, lengths, inputs.rope, carry)
    return reference.attend(inputs.q_rot, k, v, seen)


def automatic(plan: LayerPlan, tokens: int = 1) -> Route:
    """Return what serves a layer of `DIMS` if nobody names an implementation."""
    return dispatch.choose(None, plan, DIMS.num_attention_heads, tokens)


prefill = quick_jit(prefill_layer, static_argnums=0)
decode = quick_jit(functools.partial(decode_layer, route=XLA), static_argnums=0)
decode_natively = quick_jit(functools.partial(decode_layer, route=NATIVE), static_argnums=0)
append = quick_jit(append_layer, static_argnums=0, static_argnames="prefill")
attend_reference = quick_jit(_reference, static_argnums=0)
decode_rows = quick_jit(reference.decode_rows, static_argnums=0)
decode_vectors = quick_jit(reference.decode_vectors, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """B sequences of S tokens of one layer, as NumPy arrays: q [B, N, S, H]; k_pre, k_rot, v [B, K,
    S, H]; x [B, S, 2 K H]."""

    q: np.ndarray
    k_pre: np.ndarray
    k_rot: np.ndarray
    v: np.ndarray
    rope: kvq.types.Rope

    @property
    def x(self) -> np.ndarray:
        """Return the layer input from which `layer_weights` make these keys and values."""
        k, v = (
            np.moveaxis(np.asarray(a, np.float32), 1, 2).reshape(a.shape[0], a.shape[2], -1)
            for a in (self.k_pre, self.v)
        )
        return np.concatenate(
            [k @ np.linalg.inv(key_map(k.shape[-1])), v], axis=-1, dtype=np.float32
        ).astype(self.v.dtype)

    def below(self, plan: LayerPlan, whole: bool = False) -> Any:
        """The carry of the layer below: for layers that build on it, an accumulator near these
        inputs, of the body's tokens or of all."""
        codec = plan.cross_layer
        if codec is None or codec.starts:
            return ()
        x = np.asarray(self.x, np.float32)
        held = 0.9 * x + 0.1 * np.random.default_rng(5).normal(size=x.shape[1:])
        if not whole:
            held = held[:, plan.regions.sink :][:, : plan.regions.body_capacity]
        leaf = codec.accumulator(*held.shape[:2])
        return leaf.store(jnp.asarray(held).astype(leaf.dtype))

    def window(
        self, start: np.ndarray, stop: np.ndarray, tokens: int, padding: float = np.nan
    ) -> kvq.types.LayerInputs:
        """Tokens start[b] .. min(start[b] + tokens, stop[b]) of every row, right-padded to
        `tokens`."""
        positions = start[:, None] + np.arange(tokens)
        valid = positions < stop[:, None]
        index = np.minimum(positions, self.v.shape[2] - 1)[:, None, :, None]

        def cut(rows: np.ndarray) -> jax.Array:
            return jnp.asarray(
                np.where(
                    valid[:, None, :, None],
                    np.take_along_axis(rows, index, 2),
                    np.asarray(padding, rows.dtype),
                )
            )

        x, q, k_pre, k_rot, v = map(cut, (self.x[:, None], self.q, self.k_pre, self.k_rot, self.v))
        return kvq.types.LayerInputs(
            x[:, 0],
            q,
            q,
            k_pre,
            k_rot,
            v,
            jnp.asarray(positions, jnp.int32),
            jnp.asarray(valid),
            self.rope,
        )

    def rows(self, index: list[int]) -> Sequences:
        return dataclasses.replace(
            self, **{f: getattr(self, f)[index] for f in ("q", "k_pre", "k_rot", "v")}
        )


@functools.cache
def sequences(
    batch: int = 8,
    dims: CacheDims = DIMS,
    capacity: int = CAPACITY,
    seed: int = 0,
    dtype: str = "float32",
) -> Sequences:
    """Random sequences with a few large key channels. The first 5 tokens have the largest keys of
    all: so the statistics of a prompt do not depend on where it ends.
    """
    rng = np.random.default_rng(seed)
    h = dims.head_dim
    q = rng.normal(size=(batch, dims.num_attention_heads, capacity, h))
    k, v = (rng.normal(size=(batch, dims.num_key_value_heads, capacity, h)) for _ in range(2))
    k[..., :: h // 4] *= 3
    k[:, :, :5] = np.sign(k[:, :, :5]) * np.abs(k).max(axis=2, keepdims=True)
    rope = kvq.types.Rope(
        jnp.asarray(100.0 ** (-np.arange(h // 2) / (h // 2)), jnp.float32),
        jnp.ones((), jnp.float32),
    )
    backwards = -jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (batch, capacity))
    k_pre = rotate(jnp.asarray(k, jnp.float32), backwards, rope)
    q, k_pre, k, v = (np.asarray(a, np.float32).astype(jnp.dtype(dtype)) for a in (q, k_pre, k, v))
    return Sequences(q, k_pre, k, v, rope)


@functools.cache
def key_map(width: int) -> np.ndarray:
    """Return an invertible matrix whose singular values differ, so that its singular vectors are
    determined."""
    rng = np.random.default_rng(7)
    left, right = (np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(2))
    return (left * np.linspace(2, 0.5, width)) @ right


@functools.cache
def key_bias(width: int) -> np.ndarray:
    """Return the bias of the keys of `sequences`, where a cache asks for it; the x of such a
    projection is read nowhere."""
    return np.random.default_rng(8).normal(size=width).astype(np.float32)


def layer_weights(heads: int, head_dim: int, bias: np.ndarray | None = None) -> LayerWeights:
    """Projections that take `Sequences.x` to its keys and values, without a bias. With one, it is
    part of the same keys."""
    width = heads * head_dim
    zeros, eye = np.zeros((width, width)), np.eye(width)
    k_kernel, v_kernel = (
        jnp.asarray(np.concatenate(pair), jnp.float32)
        for pair in ((key_map(width), zeros), (zeros, eye))
    )
    ones = jnp.ones(2 * width, jnp.float32)
    k_bias = None if bias is None else jnp.asarray(bias)
    return LayerWeights(k_kernel, v_kernel, ones, jnp.asarray(1e-5, jnp.float32), k_bias)


def empty(
    spec: str,
    batch: int = 8,
    dims: CacheDims = DIMS,
    capacity: int = CAPACITY,
    dtype: str = "float32",
) -> tuple[LayerPlan, LayerState]:
    """Return the last layer of a new cache: in a cross-layer method, one that may build on
    another."""
    cache = kvq.init_cache(spec, dims, batch, capacity, dtype)
    return cache.plans[-1], cache.layers[-1]


@functools.cache
def parameters_of(plan: LayerPlan) -> Any:
    """Parameters for a layer of these tests, calibrated on sequences that the tests do not use; ()
    where no side needs any."""
    dims = CacheDims(1, 2 * plan.heads, plan.heads, plan.head_dim, 2 * plan.heads * plan.head_dim)
    text = sequences(2, dims, seed=99)
    whole = text.window(np.zeros(2, np.int32), np.full(2, CAPACITY, np.int32), CAPACITY)

    bias = key_bias(plan.heads * plan.head_dim) if isinstance(plan.k, BiasSubtracting) else None
    made = plan.from_weights(layer_weights(plan.heads, plan.head_dim, bias))

    def of(codec: Codec, own: Any) -> Any:
        if not codec.learning.parameters(plan.heads):
            return own
        rows = np.moveaxis(np.asarray(codec.rows(own, whole)), 1, 2)[:, 5:].reshape(
            -1, plan.heads, plan.head_dim
        )
        slopes = np.random.default_rng(99).normal(size=rows.shape).astype(np.float32)
        q = np.moveaxis(text.q.reshape(2, plan.heads, -1, plan.head_dim), 1, 0)
        moments = np.einsum("kbrh,kbre->khe", q, q) / (q.shape[1] * q.shape[2])
        if codec.learning.fit_to_layer:
            found = codec.learning.fit_to_layer(_trace(text, moments))
        else:
            found = codec.learning.calibrate(rows, slopes, moments)
        return (own or {}) | codec.learning.carry(jax.tree.map(jnp.asarray, found))

    pair = of(plan.k, made[0]), of(plan.v, made[1])
    return pair if any(pair) else ()


def _trace(text: Sequences, moments: np.ndarray) -> LayerTrace:
    """Return whole sequences, and an output projection that mixes all heads."""
    k, v, q = (np.moveaxis(np.asarray(a), 1, 2) for a in (text.k_rot, text.v, text.q))
    heads, width = q.shape[2:]
    output = np.random.default_rng(98).normal(size=(heads * width, 32)).astype(np.float32)
    return LayerTrace(k, v, q[:, -16:], moments, output, width**-0.5, sink=5)


def boundary_lengths(plan: LayerPlan) -> np.ndarray:
    """Return the eight lengths of a ragged batch at which a region starts, fills or ages."""
    r = plan.regions
    return np.array(
        [
            0,
            1,
            r.block - 1,
            r.block,
            r.block + 1,
            r.sink + r.recent + r.block,
            r.capacity - 1,
            r.capacity,
        ],
        np.int32,
    )


def run(
    plan: LayerPlan,
    state: LayerState,
    tokens: Sequences,
    prompt: np.ndarray,
    stop: np.ndarray,
    step: int = STEP,
    padding: float = np.nan,
    stats: Any = None,
) -> tuple[np.ndarray, LayerState]:
    """Prefills `prompt` tokens of each row and decodes up to `stop`: (outputs [B, N, S, H], NaN
    where no token was decoded; the state). With `stats`, these are the statistics of the prompts,
    whatever the prompts are."""
    capacity = plan.regions.capacity
    outputs = np.full((*tokens.q.shape[:2], capacity + step, tokens.q.shape[3]), np.nan, np.float32)
    if stats is not None:
        state = dataclasses.replace(state, stats=stats)
    if prompt.max() > 0:
        inputs = tokens.window(np.zeros_like(prompt), prompt, capacity, padding)
        if not jax.tree.leaves(stats):  # none are given, or the method has none
            _, state, _ = prefill(plan, parameters_of(plan), state, inputs, tokens.below(plan))
        else:
            state = append(
                plan, parameters_of(plan), state, inputs, tokens.below(plan), prefill=True
            )
    at = np.array(prompt)
    while (at < stop).any():
        out, state, _ = decode(
            plan,
            parameters_of(plan),
            state,
            tokens.window(at, stop, step, padding),
            tokens.below(plan),
        )
        for b in range(len(at)):
            new = min(step, max(stop[b] - at[b], 0))
            outputs[b, :, at[b] : at[b] + new] = np.asarray(out, np.float32)[b, :, :new]
        at = np.minimum(at + step, np.maximum(stop, at))
    return outputs[:, :, :capacity], state


def live(plan: LayerPlan, state: LayerState, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Return the entries of a state that stand for a token, by name; the others are zeroed."""
    regions = plan.regions
    found = {}
    for side, (name, codec) in enumerate(zip(plan.names, plan.codecs, strict=True)):
        held = np.asarray(regions.ring_positions(jnp.asarray(lengths)))
        aged = np.array([regions.aged_tokens(int(n)) for n in lengths])
        in_ring = (held >= regions.sink) & (held >= regions.sink + aged[:, None])
        in_sink = np.arange(regions.sink_slots)[None] < lengths[:, None]
        found[f"ring.{name}"] = np.where(in_ring[:, None, :, None], np.asarray(state.ring[side]), 0)
        found[f"sink.{name}"] = np.where(in_sink[:, None, :, None], np.asarray(state.sink[side]), 0)
        specs = jax.tree_util.tree_leaves_with_path(codec.body(1, 1, regions.block))
        for (path, spec), array in zip(specs, jax.tree.leaves(state.body[side]), strict=True):
            entries = aged // regions.block * spec["tokens"].size
            inside = spec.along("tokens", np.arange(array.shape[spec.axis("tokens")])) < spec.along(
                "batch", entries
            )
            values = np.asarray(spec.load(array))
            found[f"body.{name}{jax.tree_util.keystr(path)}"] = np.where(
                inside, values, np.zeros((), values.dtype)
            )
        for i, stat in enumerate(jax.tree.leaves(state.stats[side])):
            found[f"stats.{name}.{i}"] = np.asarray(stat)
    return found


def differences(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """Return what is not bitwise equal between two `live` states, and the row where it first
    differs: for states of one compiled function, or that hold the same numbers. For two compiled
    functions there is `beyond_rounding`."""
    assert first.keys() == second.keys()
    found = []
    for name, one in first.items():
        unequal = np.argwhere(one.view(np.uint8) != second[name].view(np.uint8)) if one.size else []
        if len(unequal):
            found.append(f"{name} differs in {len(unequal)} bytes, first in row {unequal[0][0]}")
    return found


def beyond_rounding(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """Return what differs between two `live` states by more than two compiled functions may round
    apart (design: laws of the cache).

    Floats: 1e-5, or one unit in the last place of a 16-bit float, of the entry and of the array's
    root mean square. Integers, which are packed codes and indices of outliers: one entry in 10^4,
    and one in fewer.
    """
    assert first.keys() == second.keys()
    found = []
    for name, one in first.items():
        other = second[name]
        if np.issubdtype(one.dtype, np.integer):
            wrong, allowed = one != other, -(-one.size // 10_000)
        else:
            tolerance, allowed = max(ROUNDING, float(jnp.finfo(one.dtype).eps)), 0
            one, other = one.astype(np.float64), other.astype(np.float64)
            scale = np.sqrt(np.mean(np.square(other))) if other.size else 0.0
            wrong = ~(np.abs(one - other) <= tolerance * (np.abs(other) + scale))
        if wrong.sum() > allowed:
            found.append(
                f"{name} differs in {wrong.sum()} of {wrong.size} entries, first in row"
                f" {np.argwhere(wrong)[0][0]}"
            )
    return found


def agrees(actual: np.ndarray, expected: np.ndarray, tolerance: float, rows: np.ndarray) -> bool:
    """The one check of streaming outputs: every chosen row [B, N, T] of the last axis within
    `tolerance`."""
    return bool((row_errors(actual, expected)[rows] <= tolerance).all())
