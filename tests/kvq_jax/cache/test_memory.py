"""What a decode step costs: memory far below one layer's cache, and reads that follow the live
length, not the capacity."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch, streaming
from kvq_jax.attention.dispatch import XLA, Route
from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.update import append_layer, decode_layer, prefill_layer
from kvq_jax.codecs.bias_subtracting import BiasSubtracting
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.methods.dense import DenseCodec
from kvq_jax.types.array_types import LayerWeights
from kvq_jax.types.pytree import describe
from pallas_kernels.launch import Launch
from tests.compile_options import QUICK_COMPILE, USUAL_COMPILE
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import empty

DIMS = CacheDims(1, 8, 2, 64, 512)
CAPACITY = 131072
DECODED = "innerq", "kvquant", "int4:subtract_bias=true"
PREFILLED = "kivi", "kvquant", "innerq:subtract_bias=true"


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def inputs_of(dims: CacheDims, tokens: int, dtype: str) -> kvq.types.LayerInputs:
    q, k = (
        struct(1, heads, tokens, dims.head_dim, dtype=dtype)
        for heads in (dims.num_attention_heads, dims.num_key_value_heads)
    )
    rope = describe(
        kvq.types.Rope, inverse_frequencies=struct(dims.head_dim // 2), attention_factor=struct()
    )
    x, positions = struct(1, tokens, dims.hidden_size, dtype=dtype), struct(1, tokens, dtype="i4")
    names = dict(x=x, q_pre=q, q_rot=q, k_pre=k, k_rot=k, v=k, positions=positions, rope=rope)
    valid = struct(1, tokens, dtype=bool)
    return describe(kvq.types.LayerInputs, **names, valid=valid, residual=None, sinks=None)


def parameters_of(plan: LayerPlan, dims: CacheDims, dtype: str) -> tuple[Any, ...]:
    width, kv = dims.hidden_size, dims.num_key_value_heads * dims.head_dim
    kernel, gains = struct(width, kv, dtype=dtype), struct(width, dtype=dtype)
    bias = struct(kv, dtype=dtype) if isinstance(plan.k, BiasSubtracting) else None
    pair = plan.from_weights(LayerWeights(kernel, kernel, gains, struct(), k_bias=bias))
    calibrated = (codec.learning.carried(plan.heads) for codec in (plan.k, plan.v))
    both = tuple(
        (from_weights or {}) | {name: spec.struct for name, spec in specs.items()}
        for from_weights, specs in zip(pair, calibrated, strict=True)
    )
    return both if any(both) else ()


@functools.cache
def temporary_bytes(
    layer_function: Callable[..., Any],
    spec: str,
    tokens: int,
    capacity: int = CAPACITY,
    dims: CacheDims = DIMS,
    layer: int = 0,
    dtype: str = "bfloat16",
) -> tuple[int, int]:
    """Return (temporary bytes of one compiled call with a donated state, bytes of the layer's
    cache)."""
    cache = kvq.cache.layout(spec, dims, 1, capacity, dtype)
    plan, state, carry = cache.plans[layer], cache.layers[layer], ()
    if plan.cross_layer is not None and not plan.cross_layer.starts:
        carry = plan.cross_layer.accumulator(1, plan.regions.body_capacity).struct
    heads = dims.num_attention_heads
    route = dispatch.choose(None, plan, heads, 1 if layer_function is prefill_layer else tokens)
    compiled = jax.jit(
        lambda s, c, p, i: layer_function(plan, p, s, i, c, route), donate_argnums=(0, 1)
    )
    arguments = parameters_of(plan, dims, dtype), inputs_of(dims, tokens, dtype)
    memory = compiled.lower(state, carry, *arguments).compile(USUAL_COMPILE).memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * kvq.size.nbytes(state), (
        "the donated state is not updated in place"
    )
    return memory.temp_size_in_bytes, kvq.size.nbytes(state)


@pytest.mark.parametrize("spec", some(DECODED, DECODED[1:]))
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
        functools.partial(decode_layer, route=XLA), static_argnums=0, compiler_options=QUICK_COMPILE
    )
    rows = jnp.ones((2, 2, 1, 32), jnp.float32)
    for longest, chunks in (
        (0, 1),
        (streaming.BODY_CHUNK - 1, 1),
        (streaming.BODY_CHUNK, 2),
        (3 * streaming.BODY_CHUNK + 5, 4),
    ):
        positions = jnp.asarray([[longest], [min(longest, 7)]], jnp.int32)
        q, valid = jnp.ones((2, 4, 1, 32)), jnp.ones((2, 1), bool)
        inputs = kvq.types.LayerInputs(None, None, q, None, rows, rows, positions, valid, None)
        CountedCodec.chunks.clear()
        jax.block_until_ready(step(counted, (), state, inputs, ()))
        jax.effects_barrier()
        expected = list(np.arange(chunks) * streaming.BODY_CHUNK)
        assert sorted(CountedCodec.chunks) == expected, (
            f"a row of {longest + 1} tokens read chunks {sorted(CountedCodec.chunks)}"
        )


@pytest.mark.parametrize("spec", some(PREFILLED, PREFILLED[:2]))
def test_prefill_needs_no_more_than_a_dense_prefill(spec: str):
    quantized, layer = temporary_bytes(prefill_layer, spec, 4096, 8192)
    dense, dense_layer = temporary_bytes(prefill_layer, "dense", 4096, 8192)
    assert quantized + layer <= dense + dense_layer, (
        f"{quantized} + {layer} bytes, dense {dense} + {dense_layer}"
    )


def test_a_prompt_that_kernels_do_not_quantize_is_quantized_in_chunks_beside_them():
    temporary = {}
    for tokens in (1024, 16384):
        cache = kvq.cache.layout("nf4", DIMS, 1, 32768, "bfloat16")
        plan, state, inputs = cache.plans[0], cache.layers[0], inputs_of(DIMS, tokens, "bfloat16")
        for route in (XLA, Route("pallas", Launch())):
            append = functools.partial(append_layer, plan, (), prefill=True, route=route)
            lowered = jax.jit(lambda s, i, append=append: append(s, i, ()), donate_argnums=0).lower(
                state, inputs
            )
            memory = lowered.compile(QUICK_COMPILE).memory_analysis()
            temporary[route.name, tokens] = memory.temp_size_in_bytes
    assert temporary["pallas", 16384] == temporary["xla", 16384], temporary
    assert temporary["pallas", 16384] < 8 * temporary["pallas", 1024], (
        "as a whole it needs 16 times"
    )


@pytest.mark.parametrize("latent", some(("true", "false"), ("true",)))
def test_keys_and_values_of_the_whole_context_never_exist(latent: str):
    dims, spec = CacheDims(1, 8, 8, 64, 512), f"xquant:latent={latent}"
    temporary, shorter = (
        temporary_bytes(decode_layer, spec, 1, capacity, dims, dtype="float32")[0]
        for capacity in (65536, 8192)
    )
    dense = 2 * kvq.size.dense_nbytes(dims, 1, 65536)  # in float32
    assert temporary < 0.1 * dense, f"{temporary} temporary bytes, K and V would take {dense}"
    assert temporary <= 1.05 * shorter, (
        f"temporary bytes grow with the capacity: {shorter}, {temporary}"
    )


@pytest.mark.parametrize("layer", some((0, 1), (1,)), ids=["base", "difference"])
def test_the_accumulator_is_the_only_memory_that_grows(layer: int):
    dims, capacity = CacheDims(2, 8, 2, 64, 512), 65536
    spec = "xquant_cl:base_layer=0"
    temporary, _ = temporary_bytes(decode_layer, spec, 1, capacity, dims, layer, "float32")
    accumulator = 4 * capacity * dims.hidden_size
    assert temporary <= 0.2 * accumulator, (
        f"{temporary} temporary bytes beside an accumulator of {accumulator} in or out"
    )
