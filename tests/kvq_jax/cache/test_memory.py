"""What a decode step costs: memory far below one layer's cache, and reads that follow the live
length, not the capacity."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch, streaming
from kvq_jax.attention.dispatch import XLA
from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.methods.dense import DenseCodec
from kvq_jax.types.pytree import describe
from tests.compile_options import QUICK_COMPILE, USUAL_COMPILE
from tests.kvq_jax.layer_runs import empty

DIMS = CacheDims(1, 8, 2, 64, 512)
CAPACITY = 131072


def structs(tokens: int, dtype: str) -> kvq.types.LayerInputs:
    def rows(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, heads, tokens, DIMS.head_dim), jnp.dtype(dtype))

    q, k = rows(DIMS.num_attention_heads), rows(DIMS.num_key_value_heads)
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    frequencies, factor = (
        jax.ShapeDtypeStruct((DIMS.head_dim // 2,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    rope = describe(kvq.types.Rope, inverse_frequencies=frequencies, attention_factor=factor)
    names = dict(
        x=None,
        q_pre=q,
        q_rot=q,
        k_pre=k,
        k_rot=k,
        v=k,
        positions=positions,
        valid=jax.ShapeDtypeStruct((1, tokens), bool),
    )
    return describe(kvq.types.LayerInputs, **names, rope=rope, residual=None, sinks=None)


@functools.cache
def temporary_bytes(
    layer_function, spec: str, tokens: int, capacity: int = CAPACITY
) -> tuple[int, int]:
    """Return (temporary bytes of one compiled call with a donated state, bytes of the layer's
    cache)."""
    cache = kvq.cache.layout(spec, DIMS, 1, capacity, "bfloat16")
    bias = {"bias": jax.ShapeDtypeStruct((DIMS.num_key_value_heads * DIMS.head_dim,), jnp.bfloat16)}
    calibrated = (
        {
            name: spec.struct
            for name, spec in codec.learning.parameters(DIMS.num_key_value_heads).items()
        }
        for codec in cache.plans[0].codecs
    )
    params = tuple(
        own | (bias if codec.learning.weights else {})
        for own, codec in zip(calibrated, cache.plans[0].codecs, strict=True)
    )
    plan = cache.plans[0]
    heads = DIMS.num_attention_heads
    route = dispatch.choose(None, plan, heads, 1 if layer_function is prefill_layer else tokens)
    compiled = jax.jit(
        lambda s, p, i: layer_function(plan, p, s, i, (), route)[:2], donate_argnums=0
    )
    memory = (
        compiled.lower(cache.layers[0], params, structs(tokens, "bfloat16"))
        .compile(USUAL_COMPILE)
        .memory_analysis()
    )
    assert memory.alias_size_in_bytes >= 0.99 * kvq.size.nbytes(cache.layers), (
        "the donated state is not updated in place"
    )
    return memory.temp_size_in_bytes, kvq.size.nbytes(cache.layers)


@pytest.mark.parametrize("spec", ["innerq", "kvquant", "int4:subtract_bias=true"])
def test_a_decode_step_needs_far_less_than_its_layer(spec: str):
    temporary, layer = temporary_bytes(decode_layer, spec, 1)
    assert temporary < 0.1 * layer, f"{temporary} temporary bytes, the layer has {layer}"
    shorter, _ = temporary_bytes(decode_layer, spec, 1, CAPACITY // 8)
    assert temporary <= 1.05 * shorter, (
        f"temporary bytes grow with the capacity: {shorter}, {temporary}"
    )


@dataclasses.dataclass(frozen=True)
class CountedCodec(DenseCodec):
    """A dense codec that counts the chunks whose scores are computed at run time."""

    chunks: ClassVar[list[int]] = []

    def scores(self, params, stats, query, body, positions, rope):
        jax.debug.callback(lambda first: self.chunks.append(int(first)), positions[0, 0])
        return super().scores(params, stats, query, body, positions, rope)


def test_chunks_read_follow_the_live_length():
    capacity = 6 * streaming.BODY_CHUNK
    plan, state = empty("dense", batch=2, capacity=capacity)
    counted = LayerPlan(
        CountedCodec("k", 32, "float32"), plan.v, plan.regions, plan.heads, plan.head_dim
    )
    step = jax.jit(
        functools.partial(decode_layer, route=XLA),
        static_argnums=0,
        compiler_options=QUICK_COMPILE,
    )
    rows = jnp.ones((2, 2, 1, 32), jnp.float32)
    for longest, chunks in (
        (0, 1),
        (streaming.BODY_CHUNK - 1, 1),
        (streaming.BODY_CHUNK, 2),
        (3 * streaming.BODY_CHUNK + 5, 4),
    ):
        positions = jnp.asarray([[longest], [min(longest, 7)]], jnp.int32)
        inputs = kvq.types.LayerInputs(
            None,
            None,
            jnp.ones((2, 4, 1, 32)),
            None,
            rows,
            rows,
            positions,
            jnp.ones((2, 1), bool),
            None,
        )
        CountedCodec.chunks.clear()
        jax.block_until_ready(step(counted, (), state, inputs, ()))
        jax.effects_barrier()
        expected = list(np.arange(chunks) * streaming.BODY_CHUNK)
        assert sorted(CountedCodec.chunks) == expected, (
            f"a row of {longest + 1} tokens read chunks {sorted(CountedCodec.chunks)}"
        )


@pytest.mark.parametrize("spec", ["kivi", "kvquant", "innerq:subtract_bias=true"])
def test_prefill_needs_no_more_than_a_dense_prefill(spec: str):
    quantized, layer = temporary_bytes(prefill_layer, spec, 4096, 8192)
    dense, dense_layer = temporary_bytes(prefill_layer, "dense", 4096, 8192)
    assert quantized + layer <= dense + dense_layer, (
        f"{quantized} + {layer} bytes, dense {dense} + {dense_layer}"
    )
