"""XQuant and XQuant-CL beyond the laws of the method table: arithmetic against a plain NumPy reading, the carry, sizes, memory, errors."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax import cross_layer
from kvq_jax.array_types import LayerWeights
from kvq_jax.body import load_body
from kvq_jax.cache import CacheDims
from kvq_jax.layer import decode_layer
from kvq_jax.methods.xquant.projections import factored, project, weighted_values
from tests.compile_options import USUAL_COMPILE
from tests.kvq_jax.layer_runs import STEP, decode, differences, live, parameters_of, prefill, quick_jit, sequences

SHARED = pathlib.Path(__file__).parents[2] / "../shared/golden/xquant_own_not_reference.npz"
LAYERS, TOKENS = 4, 32
DIMS = CacheDims(LAYERS, 4, 2, 8, 48)  # latents of 16 channels, of 32 for both sides together
LLAMA_2_7B = CacheDims(32, 32, 32, 128, 4096)
LLAMA_3_8B = CacheDims(32, 32, 8, 128, 4096)


# --- a plain reading of the paper ---------------------------------------------------------------------------------------------------------


def quantized(rows: np.ndarray, bits: int, group: int, axis: int) -> np.ndarray:
    """Asymmetric uniform round trip of groups along an axis of [T, C]; 16-bit scales and zeros, half to even."""
    moved = np.moveaxis(rows, axis, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, group)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
    zero = low.astype(np.float16).astype(np.float32)
    codes = np.round(np.clip((groups - zero) / scale, 0, 2**bits - 1))
    return np.moveaxis((codes * scale + zero).reshape(moved.shape), -1, axis)


def svd(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(U, S B^T). Groups of latents depend on the signs of U's columns: the largest entry of each is positive."""
    u, s, bt = np.linalg.svd(matrix, full_matrices=False)
    signs = np.where(np.take_along_axis(u, np.abs(u).argmax(0)[None], 0) < 0, -1, 1)
    return u * signs, (s * signs[0])[:, None] * bt


def plain_xquant(x: np.ndarray, wk: np.ndarray, wv: np.ndarray, bits: int, group: int, latent: bool) -> tuple[np.ndarray, np.ndarray]:
    """(K before RoPE, V) of one layer; x [T, D]."""
    if not latent:
        return (hat := quantized(x, bits, group, 1)) @ wk, hat @ wv
    (uk, mk), (uv, mv) = svd(wk), svd(wv)
    return quantized(x @ uk, bits, group, 0) @ mk, quantized(x @ uv, bits, group, 1) @ mv


def plain_cross_layer(
    x: np.ndarray, wk: np.ndarray, wv: np.ndarray, bits: int, base: int, base_bits: int, group: int, latent: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(K before RoPE, V) of every layer from the base on; x [L, T, D]."""
    hat, found = quantized(x[base], base_bits, group, 1), []
    for i in range(base, len(x)):
        if i > base:
            basis = svd(np.concatenate([wk[i], wv[i]], axis=1))[0] if latent else np.eye(x.shape[-1], dtype=np.float32)
            hat = hat + quantized((x[i] - hat) @ basis, bits, group, 1) @ basis.T
        found.append((hat @ wk[i], hat @ wv[i]))
    return found


# --- the arithmetic -----------------------------------------------------------------------------------------------------------------------


@functools.cache
def layers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x [L, T, D] whose successive layers are near each other, W_k, W_v [L, D, K H])."""
    rng = np.random.default_rng(0)
    x = np.cumsum(rng.normal(size=(LAYERS, TOKENS, DIMS.hidden_size)) * np.array([3, 1, 0.5, 0.5])[:, None, None], axis=0)
    wk, wv = (0.2 * rng.normal(size=(LAYERS, DIMS.hidden_size, 16)) for _ in range(2))
    return x.astype(np.float32), wk.astype(np.float32), wv.astype(np.float32)


def weights_of(wk: np.ndarray, wv: np.ndarray) -> LayerWeights:
    ones = jnp.ones(wk.shape[0], jnp.float32)
    return LayerWeights(jnp.asarray(wk), jnp.asarray(wv), None, None, None, ones, jnp.asarray(1e-5, jnp.float32))


def round_trips(
    spec: str, dims: CacheDims, x: np.ndarray, wk: np.ndarray, wv: np.ndarray, bases: list[dict[str, np.ndarray]] | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(K before RoPE, V), [T, K * H], of every layer as a cache of `spec` returns them; with given matrices U of k, v or both (kv)."""
    plans = kvq.layout(spec, dims, 1, x.shape[1]).plans
    tokens, heads = x.shape[1], dims.num_key_value_heads
    still = kvq.Rope(jnp.zeros(dims.head_dim // 2), jnp.ones(()))  # angle 0: keys come back as they were before RoPE
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    nothing, q = jnp.zeros((1, heads, tokens, dims.head_dim)), jnp.zeros((1, dims.num_attention_heads, tokens, dims.head_dim))
    carry: Any = ()
    found = []
    for i, plan in enumerate(plans):
        inputs = kvq.LayerInputs(jnp.asarray(x[i])[None], None, q, None, nothing, nothing, positions, positions >= 0, still)
        own = plan.from_weights(weights_of(wk[i], wv[i]))
        own = own if bases is None else tuple(rebased(mine, side, bases[i], wk[i], wv[i]) for side, mine in zip("kv", own, strict=True))
        k, v, carry = kvq.roundtrip_layer(spec, inputs, own, i, carry)
        found.append(tuple(np.asarray(jnp.swapaxes(a, 1, 2)).reshape(tokens, -1) for a in (k, v)))
    return found


def rebased(own: dict[str, Any], side: str, bases: dict[str, np.ndarray], wk: np.ndarray, wv: np.ndarray) -> dict[str, Any]:
    """Parameters with another U: that of a file, whose signs are its own."""
    if "basis" not in own:
        return own
    basis = bases["kv" if "k" in own and "v" in own else side]
    kernels = {"k": wk, "v": wv}
    changed = {name: own[name] | {"kernel": jnp.asarray(basis.T @ kernels[name])} for name in kernels if name in own}
    return changed | {"basis": jnp.asarray(basis)}


def worst(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest error of an entry, relative to the largest entry."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def nearly_all_agree(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Rows that hold a code on a rounding tie may differ: at most one in a hundred."""
    off = np.abs(found - wanted).max(axis=-1) / np.abs(wanted).max()
    return float((off > 1e-5).mean()) <= 0.01


@pytest.mark.parametrize("latent", [False, True], ids=["x", "latent"])
@pytest.mark.parametrize("bits", [2, 4])
def test_xquant_is_the_plain_reading(bits: int, latent: bool):
    x, wk, wv = layers()
    found = round_trips(f"xquant:bits={bits},group_size=16,latent={str(latent).lower()}", DIMS, x, wk, wv)
    for i in range(LAYERS):
        wanted = plain_xquant(x[i], wk[i], wv[i], bits, 16, latent)
        for name, one, other in zip("kv", found[i], wanted, strict=True):
            assert nearly_all_agree(one, other), f"layer {i}, {name}: {worst(one, other):.1e}"
            assert not nearly_all_agree(one, plain_xquant(x[i], wk[i], wv[i], bits, 8, latent)["kv".index(name)]), "other groups pass"


@pytest.mark.parametrize("latent", [False, True], ids=["x", "latent"])
@pytest.mark.parametrize(("bits", "base"), [(2, 1), (3, 0)])
def test_xquant_cl_is_the_plain_reading(bits: int, base: int, latent: bool):
    x, wk, wv = layers()
    spec = f"xquant_cl:bits={bits},base_layer={base},group_size=16,latent={str(latent).lower()}"
    found = round_trips(spec, DIMS, x, wk, wv)
    wanted = plain_cross_layer(x, wk, wv, bits, base, 4, 16, latent)
    for i, pair in enumerate(wanted, start=base):
        for name, one, other in zip("kv", found[i], pair, strict=True):
            assert nearly_all_agree(one, other), f"layer {i}, {name}: {worst(one, other):.1e}"
    alone = [plain_xquant(x[i], wk[i], wv[i], bits, 16, latent)[1] for i in range(LAYERS)]
    assert not nearly_all_agree(found[-1][1], alone[-1]), "layers coded by themselves pass"
    for i in range(base):
        assert nearly_all_agree(found[i][0], plain_xquant(x[i], wk[i], wv[i], 4, 16, latent)[0]), f"early layer {i} is not 4-bit xquant"


@pytest.mark.skipif(not SHARED.exists(), reason="needs the project's shared golden files")
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_golden_file_is_matched(bits: int):
    """Its scales and zeros are fp32. Codes may differ on ties, in 1e-4 of the entries; a latent's difference spreads over a row."""
    with np.load(SHARED, allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    x, wk, wv = data["X"], data["Wk"], data["Wv"]
    count = len(x)
    mha, gqa = CacheDims(count, 3, 3, 128, 384), CacheDims(count, 3, 1, 128, 384)
    eye = np.broadcast_to(np.eye(384, dtype=np.float32), (count, 384, 384))
    common = "group_size=128,scale_dtype=float32"
    for i, (k, _) in enumerate(round_trips(f"xquant:bits={bits},latent=false,{common}", mha, x, eye, eye)):
        assert nearly_all_agree(k, data[f"mha_Xhat_b{bits}"][i]), f"MHA, layer {i}: {worst(k, data[f'mha_Xhat_b{bits}'][i]):.1e}"
    bases = [{side: data.get(f"U{side}_{i}") for side in ("k", "v", "kv")} for i in range(count)]
    for i, pair in enumerate(round_trips(f"xquant:bits={bits},latent=true,{common}", gqa, x, wk, wv, bases)):
        for name, one in zip("KV", pair, strict=True):
            wanted = data[f"gqa_{name}_b{bits}"][i]
            assert nearly_all_agree(one, wanted), f"GQA, layer {i}, {name}: {worst(one, wanted):.1e}"
    for i, (k, _) in enumerate(round_trips(f"xquant_cl:bits={bits},latent=false,{common}", mha, x, eye, eye)[2:]):
        wanted = data[f"cl_mha_Xhat_b{bits}_layers2on"][i]
        assert nearly_all_agree(k, wanted), f"MHA, cross-layer {i}: {worst(k, wanted):.1e}"
        assert i == 0 or not nearly_all_agree(k, data[f"mha_Xhat_b{bits}"][i + 2]), "layers coded by themselves pass"
    for i, pair in enumerate(round_trips(f"xquant_cl:bits={bits},latent=true,{common}", gqa, x, wk, wv, bases)[2:]):
        for name, one in zip("KV", pair, strict=True):
            wanted = data[f"cl_gqa_{name}_b{bits}_layers2on"][i]
            assert nearly_all_agree(one, wanted), f"GQA, cross-layer {i}, {name}: {worst(one, wanted):.1e}"


def test_factors_are_orthonormal_and_multiply_to_the_projections():
    _, wk, wv = layers()
    basis, (k, v) = factored(jnp.asarray(wk[0]), jnp.asarray(wv[0]))
    np.testing.assert_allclose(basis.T @ basis, np.eye(32), atol=1e-5)
    np.testing.assert_allclose(basis @ k, wk[0], atol=1e-5)
    np.testing.assert_allclose(basis @ v, wv[0], atol=1e-5)
    assert np.abs(basis @ k - wv[0]).max() > 0.1, "the other projection passes"
    again, _ = factored(-jnp.asarray(wk[0]), -jnp.asarray(wv[0]))
    np.testing.assert_allclose(again, basis, atol=1e-4, err_msg="the sign of a factor is not fixed")
    structs = factored(*(jax.ShapeDtypeStruct(w.shape, w.dtype) for w in (wk[0], wv[0])))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), structs) == jax.tree.map(lambda a: (a.shape, a.dtype), (basis, (k, v)))


@pytest.mark.parametrize("biased", [False, True])
def test_weighted_values_need_no_values(biased: bool):
    """The sum taken among rows equals that among rebuilt values; few queries take the one, many the other."""
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(2, 1, 9, 48)), jnp.float32)
    own = {"kernel": jnp.asarray(rng.normal(size=(48, 16)), jnp.float32)}
    if biased:
        own["bias"] = jnp.asarray(rng.normal(size=16), jnp.float32)
    values = project(own, rows, 2)
    for queries in (1, 3, 8, 40):
        weights = jnp.asarray(rng.uniform(size=(2, 2, queries, 9)), jnp.float32)
        wanted = np.einsum("bkrt,bkth->bkrh", weights, values)
        assert worst(np.asarray(weighted_values(own, weights, rows)), wanted) < 1e-5, f"{queries} queries"
        assert worst(np.asarray(weighted_values(own, weights, rows[:, :, ::-1])), wanted) > 1e-2, "another order of tokens passes"


# --- the carry ----------------------------------------------------------------------------------------------------------------------------

CARRIED = "xquant_cl:base_layer=1,group_size=16,latent={},sink=2,recent=3,block=16"


def flow(spec: str, prompt: int, stop: int, capacity: int = 90):
    """Three layers of one cache, each with its own tokens, prefilled and decoded: the state of every layer."""
    dims = CacheDims(3, 4, 2, 32, 128)
    cache = kvq.init_cache(spec, dims, 2, capacity, "float32")
    tokens = [sequences(2, dims, seed=30 + i) for i in range(3)]
    states, own = list(cache.layers), [parameters_of(plan) for plan in cache.plans]
    at = np.zeros(2, np.int32)
    while at[0] < stop:
        first = at[0] == 0 and prompt > 0
        until = np.full(2, prompt if first else stop, np.int32)
        carry: Any = ()
        for i, plan in enumerate(cache.plans):
            step, size = (prefill, capacity) if first else (decode, STEP)
            _, states[i], carry = step(plan, own[i], states[i], tokens[i].window(at, until, size), carry)
        at = np.minimum(at + (prompt if first else STEP), stop).astype(np.int32)
    return cache.plans, states, own


@pytest.mark.parametrize("latent", ["true", "false"])
def test_codes_do_not_depend_on_where_the_prompt_ended(latent: str):
    """Through three layers, the accumulator flowing from one to the next."""
    spec, length = CARRIED.format(latent), np.full(2, 80, np.int32)
    plans, whole, _ = flow(spec, 80, 80)
    _, split, _ = flow(spec, 29, 80)
    for i, plan in enumerate(plans):
        first, second = live(plan, whole[i], length), live(plan, split[i], length)
        codes = [name for name in first if "words" in name]
        off = {name: float((first[name] != second[name]).mean()) for name in codes}
        assert max(off.values()) <= 1e-3, f"layer {i}: share of words that differ {off}"
        exact = {name: a for name, a in first.items() if name.startswith(("ring", "sink"))}
        assert not differences(exact, {name: second[name] for name in exact}), f"layer {i}"
    later, earlier = (live(plans[2], whole[i], length) for i in (2, 1))
    assert differences({"ring": later["ring.kv"][..., :64]}, {"ring": earlier["ring.kv"][..., :64]}), "layers hold the same rows"


def test_the_accumulator_is_what_the_layers_below_said():
    """acc after a layer = acc before it + its decoded differences, for live tokens of a ragged batch."""
    plans, states, own = flow(CARRIED.format("true"), 80, 80)
    live_tokens = jnp.asarray([64, 32], jnp.int32)
    base = cross_layer.advance(plans[1], own[1], states[1], live_tokens, ())
    after = cross_layer.advance(plans[2], own[2], states[2], live_tokens, base)
    codec = plans[2].k
    decoded = codec.decode(own[2][0], (), load_body(codec.body(1, 1, 16), states[2].body[0]))
    wanted = base + jnp.einsum("btc,dc->btd", decoded[:, 0], own[2][0]["basis"])
    np.testing.assert_allclose(after[:, :64], wanted[:, :64], atol=1e-5)
    assert np.abs(np.asarray(after - base))[:, :64].max() > 1e-2, "the layer added nothing"


def test_a_layer_without_its_accumulator_is_an_error():
    plans, states, own = flow(CARRIED.format("true"), 20, 20)
    inputs = sequences(2).window(np.full(2, 20, np.int32), np.full(2, 28, np.int32), STEP)
    with pytest.raises(ValueError, match="builds on the one below it"):
        decode_layer(plans[2], own[2], states[2], inputs, ())


def test_a_bfloat16_accumulator_is_near_the_float32_one():
    x, wk, wv = layers()
    found = {
        dtype: round_trips(f"xquant_cl:bits=3,base_layer=0,group_size=16,accumulator_dtype={dtype}", DIMS, x, wk, wv)
        for dtype in ("float32", "bfloat16")
    }
    error = worst(found["bfloat16"][-1][1], found["float32"][-1][1])
    assert 1e-5 < error < 0.1, f"relative error {error:.1e}"


# --- sizes --------------------------------------------------------------------------------------------------------------------------------


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
    """Tables 1, 4 and B.1: the body's bits by those of fp16, windows left out. Counted from the arrays."""
    assert round(kvq.body_bits_per_element(spec, dims) / 16, 2) == paper


@pytest.mark.parametrize(("bits", "paper"), [(4, 0.27), (3, 0.21), (2, 0.15)])
def test_the_papers_size_of_shared_heads_leaves_the_wide_base_out(bits: int, paper: float):
    """Table 4 counts Llama-3.1-8B's base layer, which is as wide as the model, as a layer of latents; with it the cache is larger."""
    spec = kvq.parse(f"xquant_cl:bits={bits}")
    plans = kvq.layout(spec, LLAMA_3_8B, 1, 128).plans
    tokens = 128 * 32

    def stored_bits(plan) -> float:
        arrays = jax.tree.leaves([codec.body(1, plan.heads, tokens) for codec in plan.codecs])
        return 8 * kvq.nbytes([a.struct for a in arrays]) / (2 * plan.heads * tokens * plan.head_dim)

    of_layers = [stored_bits(plan) for plan in plans]
    assert of_layers[2] == 2 * of_layers[1], "the base layer of a model with four query heads for each KV head is twice as wide"
    counted = np.mean([of_layers[1] if i == 2 else b for i, b in enumerate(of_layers)]) / 16
    assert round(counted, 2) == paper
    assert kvq.body_bits_per_element(spec, LLAMA_3_8B) / 16 == pytest.approx(np.mean(of_layers) / 16)
    assert kvq.body_bits_per_element(spec, LLAMA_3_8B) / 16 > counted


# --- memory -------------------------------------------------------------------------------------------------------------------------------


def decode_temporaries(spec: str, layer: int, dims: CacheDims, capacity: int) -> tuple[int, int, int]:
    """(temporary bytes of a compiled decode step of one layer, bytes of its cache, bytes of dense K and V)."""
    cache = kvq.layout(spec, dims, 1, capacity, "float32")
    plan = cache.plans[layer]
    width, kv = dims.hidden_size, dims.num_key_value_heads * dims.head_dim

    def struct(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = LayerWeights(struct(width, kv), struct(width, kv), None, None, None, struct(width), struct())
    q, k = struct(1, dims.num_attention_heads, 1, dims.head_dim), struct(1, dims.num_key_value_heads, 1, dims.head_dim)
    rope = kvq.Rope(struct(dims.head_dim // 2), struct())
    positions = struct(1, 1, dtype=jnp.int32)
    inputs = kvq.LayerInputs(struct(1, 1, width), q, q, k, k, k, positions, struct(1, 1, dtype=jnp.bool_), rope)
    codec, carry = plan.cross_layer, ()
    if codec is not None and not codec.starts:
        carry = codec.accumulator(1, plan.regions.body_capacity).struct
    step = jax.jit(lambda s, c, p, i: decode_layer(plan, p, s, i, c), donate_argnums=(0, 1))
    memory = step.lower(cache.layers[layer], carry, plan.from_weights(weights), inputs).compile(USUAL_COMPILE).memory_analysis()
    return memory.temp_size_in_bytes, kvq.nbytes(cache.layers[layer]), 2 * kv * capacity * 4


@pytest.mark.parametrize("latent", ["true", "false"])
def test_keys_and_values_of_the_whole_context_never_exist(latent: str):
    dims, capacity = CacheDims(1, 8, 8, 64, 512), 65536
    temporary, _, dense = decode_temporaries(f"xquant:latent={latent}", 0, dims, capacity)
    assert temporary < 0.1 * dense, f"{temporary} temporary bytes, K and V would take {dense}"
    shorter, _, _ = decode_temporaries(f"xquant:latent={latent}", 0, dims, capacity // 8)
    assert temporary <= 1.05 * shorter, f"temporary bytes grow with the capacity: {shorter}, {temporary}"


@pytest.mark.parametrize("layer", [0, 1], ids=["base", "difference"])
def test_the_accumulator_is_the_only_memory_that_grows(layer: int):
    dims, capacity = CacheDims(2, 8, 2, 64, 512), 65536
    temporary, _, _ = decode_temporaries("xquant_cl:base_layer=0", layer, dims, capacity)
    accumulator = 4 * capacity * dims.hidden_size
    assert temporary <= 0.2 * accumulator, f"{temporary} temporary bytes beside an accumulator of {accumulator} in or out"


# --- refusals -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "dims", "message"),
    [
        ("k=xquant+v=kivi", LLAMA_2_7B, "keeps one body for keys and values"),
        ("k=dense+v=xquant_cl:base_layer=0", LLAMA_3_8B, "keeps one body for keys and values"),
        ("xquant_cl:skip_layers=5", LLAMA_3_8B, "skip_layers names layer 5: layers kept exact must lie before layer 2"),
        ("xquant_cl:base_layer=40", LLAMA_3_8B, "starts at layer 40, but the model has layers 0 to 31"),
        ("xquant:k_bits=4", LLAMA_2_7B, "k_bits has no meaning here"),
        ("xquant:exact_outlier_channel=true", LLAMA_2_7B, "about latents of keys"),
        ("xquant_cl:reading=residual_stream,latent=true", LLAMA_3_8B, "needs latent=false"),
        ("xquant:group_size=96,latent=false", LLAMA_3_8B, "group_size=96 does not divide the row"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec: str, dims: CacheDims, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        kvq.layout(spec, dims, 1, 1024)
    assert "\n" not in str(caught.value)


def test_other_methods_mix_with_latents_and_with_exact_layers_before_the_base():
    assert kvq.layout("k=xquant+v=kivi:bits=4", LLAMA_3_8B, 1, 1024).plans[0].names == ("k", "v")
    plans = kvq.layout("xquant_cl:skip_layers=0-1", LLAMA_3_8B, 1, 1024).plans
    assert [plan.names for plan in plans[:4]] == [("k", "v"), ("k", "v"), ("kv",), ("kv",)]


@pytest.mark.parametrize("spec", ["xquant:block=16", "xquant:latent=false,block=16"])
def test_missing_parameters_are_named(spec: str):
    cache = kvq.init_cache(spec, DIMS, 1, 64, "float32")
    inputs = dataclasses.replace(
        sequences(1, DIMS, 64).window(np.zeros(1, np.int32), np.full(1, 20, np.int32), 64), x=jnp.ones((1, 64, 48))
    )
    with pytest.raises(ValueError, match=r"call llama = prepare\(llama, spec\) first"):
        quick_jit(decode_layer, static_argnums=0)(cache.plans[0], (), cache.layers[0], inputs, ())
