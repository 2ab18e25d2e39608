"""XQuant's caches from outside: the sizes of the paper's tables, what a step needs beside the
cache, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.update import decode_layer
from kvq_jax.types.array_types import LayerWeights
from kvq_jax.types.pytree import describe
from tests.compile_options import USUAL_COMPILE

LLAMA_2_7B = CacheDims(32, 32, 32, 128, 4096)
LLAMA_3_8B = CacheDims(32, 32, 8, 128, 4096)


# --- sizes


@pytest.mark.parametrize(
    ("dims", "spec", "paper"),
    [
        (LLAMA_2_7B, "xquant:bits=8", 0.26),
        (LLAMA_2_7B, "xquant:bits=4", 0.13),
        (LLAMA_2_7B, "xquant:bits=3", 0.10),
        (LLAMA_2_7B, "xquant:bits=4@0-2/2", 0.08),
        (LLAMA_2_7B, "xquant_cl:bits=4", 0.13),
        (LLAMA_2_7B, "xquant_cl:bits=3", 0.10),
        (LLAMA_2_7B, "xquant_cl:bits=2", 0.08),
        (LLAMA_3_8B, "xquant:bits=4", 0.27),
        (LLAMA_3_8B, "xquant:bits=3", 0.20),
        (LLAMA_3_8B, "xquant:bits=2", 0.14),
        (LLAMA_3_8B, "xquant:bits=2,exact_outlier_channel=true", 0.14),
        (LLAMA_3_8B, "xquant:bits=4@0-2/3", 0.21),
        (LLAMA_3_8B, "kivi:bits=4@0-2/3,group_size=128,pre_rope=true", 0.21),
        (LLAMA_3_8B, "kivi:bits=4@0-2/2,group_size=128,pre_rope=true", 0.15),
    ],
    ids=str,
)
def test_sizes_are_those_of_the_papers_tables(dims: CacheDims, spec: str, paper: float):
    """Tables 1, 4 and B.1: the body's bits by those of fp16, windows left out. Counted from the
    arrays."""
    assert round(kvq.size.body_bits_per_element(spec, dims) / 16, 2) == paper


# --- memory


def decode_temporaries(
    spec: str, layer: int, dims: CacheDims, capacity: int
) -> tuple[int, int, int]:
    """Return (temporary bytes of a compiled decode step of one layer, bytes of its cache, bytes of
    dense K and V)."""
    cache = kvq.cache.layout(spec, dims, 1, capacity, "float32")
    plan = cache.plans[layer]
    width, kv = dims.hidden_size, dims.num_key_value_heads * dims.head_dim

    def struct(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = LayerWeights(struct(width, kv), struct(width, kv), struct(width), struct())
    q, k = (
        struct(1, dims.num_attention_heads, 1, dims.head_dim),
        struct(1, dims.num_key_value_heads, 1, dims.head_dim),
    )
    rope = describe(
        kvq.types.Rope, inverse_frequencies=struct(dims.head_dim // 2), attention_factor=struct()
    )
    positions = struct(1, 1, dtype=jnp.int32)
    rows = dict(
        x=struct(1, 1, width),
        q_pre=q,
        q_rot=q,
        k_pre=k,
        k_rot=k,
        v=k,
        valid=struct(1, 1, dtype=jnp.bool_),
    )
    inputs = describe(
        kvq.types.LayerInputs, **rows, positions=positions, rope=rope, residual=None, sinks=None
    )
    codec, carry = plan.cross_layer, ()
    if codec is not None and not codec.starts:
        carry = codec.accumulator(1, plan.regions.body_capacity).struct
    step = jax.jit(lambda s, c, p, i: decode_layer(plan, p, s, i, c), donate_argnums=(0, 1))
    memory = (
        step.lower(cache.layers[layer], carry, plan.from_weights(weights), inputs)
        .compile(USUAL_COMPILE)
        .memory_analysis()
    )
    return memory.temp_size_in_bytes, kvq.size.nbytes(cache.layers[layer]), 2 * kv * capacity * 4


@pytest.mark.parametrize("latent", ["true", "false"])
def test_keys_and_values_of_the_whole_context_never_exist(latent: str):
    dims, capacity = CacheDims(1, 8, 8, 64, 512), 65536
    temporary, _, dense = decode_temporaries(f"xquant:latent={latent}", 0, dims, capacity)
    assert temporary < 0.1 * dense, f"{temporary} temporary bytes, K and V would take {dense}"
    shorter, _, _ = decode_temporaries(f"xquant:latent={latent}", 0, dims, capacity // 8)
    assert temporary <= 1.05 * shorter, (
        f"temporary bytes grow with the capacity: {shorter}, {temporary}"
    )


@pytest.mark.parametrize("layer", [0, 1], ids=["base", "difference"])
def test_the_accumulator_is_the_only_memory_that_grows(layer: int):
    dims, capacity = CacheDims(2, 8, 2, 64, 512), 65536
    temporary, _, _ = decode_temporaries("xquant_cl:base_layer=0", layer, dims, capacity)
    accumulator = 4 * capacity * dims.hidden_size
    assert temporary <= 0.2 * accumulator, (
        f"{temporary} temporary bytes beside an accumulator of {accumulator} in or out"
    )


# --- refusals


@pytest.mark.parametrize(
    ("spec", "dims", "message"),
    [
        ("k=xquant+v=kivi", LLAMA_2_7B, "keeps one body for keys and values"),
        ("k=dense+v=xquant_cl:base_layer=0", LLAMA_3_8B, "keeps one body for keys and values"),
        (
            "xquant_cl:skip_layers=5",
            LLAMA_3_8B,
            "skip_layers names layer 5: layers in full precision must lie before layer 2",
        ),
        (
            "xquant_cl:base_layer=40",
            LLAMA_3_8B,
            "starts at layer 40, but the model has layers 0 to 31",
        ),
        ("k=xquant:bits=4+v=xquant:bits=2", LLAMA_2_7B, "keeps one body for keys and values"),
        ("xquant:exact_outlier_channel=true", LLAMA_2_7B, "about latents of keys"),
        ("xquant_cl:reading=residual_stream,latent=true", LLAMA_3_8B, "needs latent=false"),
        ("xquant:group_size=96,latent=false", LLAMA_3_8B, "group_size=96 does not divide the row"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec: str, dims: CacheDims, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        kvq.cache.layout(spec, dims, 1, 1024)
    assert "\n" not in str(caught.value)


def test_other_methods_mix_with_latents_and_with_exact_layers_before_the_base():
    assert kvq.cache.layout("k=xquant+v=kivi:bits=4", LLAMA_3_8B, 1, 1024).plans[0].names == (
        "k",
        "v",
    )
    plans = kvq.cache.layout("xquant_cl:skip_layers=0-1", LLAMA_3_8B, 1, 1024).plans
    assert [plan.names for plan in plans[:4]] == [("k", "v"), ("k", "v"), ("kv",), ("kv",)]
