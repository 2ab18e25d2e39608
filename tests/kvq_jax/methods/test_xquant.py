"""XQuant and XQuant-CL beyond the laws of the method table: the arithmetic against a plain NumPy
reading, and the carry."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.methods.xquant.projections import (
    factored,
    latents,
    project,
    right_factors,
    weighted_values,
)
from kvq_jax.types.array_types import LayerWeights

LAYERS, TOKENS = 4, 32
DIMS = CacheDims(LAYERS, 4, 2, 8, 48)  # latents of 16 channels, of 32 for both sides together


# --- a plain reading of the paper


def quantized(rows: np.ndarray, bits: int, group: int, axis: int) -> np.ndarray:
    """Asymmetric uniform round trip of groups along an axis of [T, C]; 16-bit scales and zeros,
    half to even."""
    moved = np.moveaxis(rows, axis, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, group)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
    zero = low.astype(np.float16).astype(np.float32)
    codes = np.round(np.clip((groups - zero) / scale, 0, 2**bits - 1))
    return np.moveaxis((codes * scale + zero).reshape(moved.shape), -1, axis)


def svd(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (U, S B^T). Groups of latents depend on the signs of U's columns: the largest entry of
    each is positive."""
    u, s, bt = np.linalg.svd(matrix, full_matrices=False)
    signs = np.where(np.take_along_axis(u, np.abs(u).argmax(0)[None], 0) < 0, -1, 1)
    return u * signs, (s * signs[0])[:, None] * bt


def plain_xquant(
    x: np.ndarray, wk: np.ndarray, wv: np.ndarray, bits: int, group: int, latent: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (K before RoPE, V) of one layer; x [T, D]."""
    if not latent:
        return (hat := quantized(x, bits, group, 1)) @ wk, hat @ wv
    (uk, mk), (uv, mv) = svd(wk), svd(wv)
    return quantized(x @ uk, bits, group, 0) @ mk, quantized(x @ uv, bits, group, 1) @ mv


def plain_cross_layer(
    x: np.ndarray, wk: np.ndarray, wv: np.ndarray, bits: int, group: int, base: int, latent: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (K before RoPE, V) of every layer from the base on, which has 4 bits; x [L, T, D]."""
    hat, found = quantized(x[base], 4, group, 1), []
    for i in range(base, len(x)):
        if i > base:
            basis = np.eye(x.shape[-1], dtype=np.float32)
            if latent:
                basis = svd(np.concatenate([wk[i], wv[i]], axis=1))[0]
            hat = hat + quantized((x[i] - hat) @ basis, bits, group, 1) @ basis.T
        found.append((hat @ wk[i], hat @ wv[i]))
    return found


# --- the arithmetic


@functools.cache
def layers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (x [L, T, D] whose successive layers are near each other, W_k, W_v [L, D, K H])."""
    rng = np.random.default_rng(0)
    x = np.cumsum(
        rng.normal(size=(LAYERS, TOKENS, DIMS.hidden_size))
        * np.array([3, 1, 0.5, 0.5])[:, None, None],
        axis=0,
    )
    wk, wv = (0.2 * rng.normal(size=(LAYERS, DIMS.hidden_size, 16)) for _ in range(2))
    return x.astype(np.float32), wk.astype(np.float32), wv.astype(np.float32)


def weights_of(wk: np.ndarray, wv: np.ndarray) -> LayerWeights:
    ones = jnp.ones(wk.shape[0], jnp.float32)
    return LayerWeights(jnp.asarray(wk), jnp.asarray(wv), ones, jnp.asarray(1e-5, jnp.float32))


def round_trips(
    spec: str, dims: CacheDims, x: np.ndarray, wk: np.ndarray, wv: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(K before RoPE, V), [T, K * H], of every layer as a cache of `spec` returns them."""
    plans = kvq.cache.layout(spec, dims, 1, x.shape[1]).plans
    tokens, heads = x.shape[1], dims.num_key_value_heads
    still = kvq.types.Rope(
        jnp.zeros(dims.head_dim // 2), jnp.ones(())
    )  # angle 0: keys come back as they were before RoPE
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    nothing, q = (
        jnp.zeros((1, count, tokens, dims.head_dim)) for count in (heads, dims.num_attention_heads)
    )
    rows = dict(q_pre=None, q_rot=q, k_pre=None, k_rot=nothing, v=nothing)
    rows |= dict(positions=positions, valid=positions >= 0, rope=still)
    carry: Any = ()
    found = []
    for i, plan in enumerate(plans):
        inputs = kvq.types.LayerInputs(jnp.asarray(x[i])[None], **rows)
        own = plan.from_weights(weights_of(wk[i], wv[i]))
        k, v, carry = kvq.cache.roundtrip_layer(spec, inputs, own, i, carry)
        found.append(tuple(np.asarray(jnp.swapaxes(a, 1, 2)).reshape(tokens, -1) for a in (k, v)))
    return found


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
    found = round_trips(
        f"xquant:bits={bits},group_size=16,latent={str(latent).lower()}", DIMS, x, wk, wv
    )
    for i in range(LAYERS):
        wanted = plain_xquant(x[i], wk[i], wv[i], bits, 16, latent)
        for name, one, other in zip("kv", found[i], wanted, strict=True):
            assert nearly_all_agree(one, other), f"layer {i}, {name}: {worst(one, other):.1e}"
            others = plain_xquant(x[i], wk[i], wv[i], bits, 8, latent)
            assert not nearly_all_agree(one, others["kv".index(name)]), "other groups pass"


@pytest.mark.parametrize("latent", [False, True], ids=["x", "latent"])
@pytest.mark.parametrize(("bits", "base"), [(2, 1), (3, 0)])
def test_xquant_cl_is_the_plain_reading(bits: int, base: int, latent: bool):
    x, wk, wv = layers()
    spec = f"xquant_cl:bits={bits},base_layer={base},group_size=16,latent={str(latent).lower()}"
    found = round_trips(spec, DIMS, x, wk, wv)
    wanted = plain_cross_layer(x, wk, wv, bits, 16, base, latent)
    for i, pair in enumerate(wanted, start=base):
        for name, one, other in zip("kv", found[i], pair, strict=True):
            assert nearly_all_agree(one, other), f"layer {i}, {name}: {worst(one, other):.1e}"
    alone = [plain_xquant(x[i], wk[i], wv[i], bits, 16, latent)[1] for i in range(LAYERS)]
    assert not nearly_all_agree(found[-1][1], alone[-1]), "layers coded by themselves pass"
    for i in range(base):
        assert nearly_all_agree(found[i][0], plain_xquant(x[i], wk[i], wv[i], 4, 16, latent)[0]), (
            f"early layer {i} is not 4-bit xquant"
        )


def test_latents_of_inputs_in_bfloat16_are_those_of_their_values():
    spec = "xquant_cl:bits=3,base_layer=0,group_size=16,latent=true"
    x, wk, wv = layers()
    narrow = x.astype(jnp.bfloat16)
    inputs = narrow, x, narrow.astype(np.float32)
    pairs = zip(*(round_trips(spec, DIMS, a, wk, wv) for a in inputs), strict=True)
    for layer, (of_narrow, of_wide, of_its_values) in enumerate(pairs):
        for name, one, wide, other in zip("kv", of_narrow, of_wide, of_its_values, strict=True):
            assert nearly_all_agree(one, other), f"layer {layer}, {name}: {worst(one, other):.1e}"
            assert not nearly_all_agree(one, wide), f"layer {layer}, {name}: any rounding passes"


@pytest.mark.parametrize("depth", [64, 8], ids=["tall", "wide"])
def test_latents_are_those_of_the_basis_that_is_not_kept(depth: int):
    rng = np.random.default_rng(2)
    kernel = jnp.asarray(rng.normal(size=(depth, 16)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 5, depth)), jnp.float32)
    turned, singular = right_factors(kernel)
    own = {"input_kernel": kernel, "kernel": turned, "singular": singular}
    basis, (fused,) = factored(kernel)
    np.testing.assert_allclose(singular[:, None] * turned, fused, atol=1e-5)
    np.testing.assert_allclose(latents(own, x)[:, 0], x @ basis, atol=1e-5)
    keys = jnp.swapaxes((x @ kernel).reshape(2, 5, 2, 8), 1, 2)
    np.testing.assert_allclose(project(own, latents(own, x), 2), keys, atol=1e-5)
    weights = jnp.asarray(rng.uniform(size=(2, 2, 3, 5)), jnp.float32)
    np.testing.assert_allclose(
        weighted_values(own, weights, latents(own, x)),
        jnp.einsum("bkrt,bkth->bkrh", weights, keys),
        atol=1e-4,
    )
    structs = right_factors(jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))
    assert [(a.shape, a.dtype) for a in structs] == [(a.shape, a.dtype) for a in (turned, singular)]


@pytest.mark.parametrize("axis", [0, 1], ids=["k", "v"])
def test_in_bfloat16_a_projection_with_small_singular_values_loses_nothing_by_it(axis: int):
    """Rounding of B mixes large latents into small ones; what is rebuilt is as near as with U."""
    rng = np.random.default_rng(4)
    left, right = (np.linalg.qr(rng.normal(size=(size, 128)))[0] for size in (256, 128))
    kernel = jnp.asarray(left * np.geomspace(1, 1e-4, 128) @ right, jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(1, 256, 256)), jnp.bfloat16)
    exact = np.asarray(x[0], np.float32) @ np.asarray(kernel, np.float32)
    basis, (fused,) = factored(kernel)
    turned, singular = right_factors(kernel)
    own = {"input_kernel": kernel, "kernel": turned, "singular": singular}

    def error(rows: Any, parameters: dict[str, Any]) -> float:
        coded = jnp.asarray(quantized(np.asarray(rows, np.float32), 4, 64, axis))
        rebuilt = project(parameters, coded[None, None], 1)[0, 0]
        return float(np.linalg.norm(rebuilt - exact) / np.linalg.norm(exact))

    with_basis = error((x @ basis)[0], {"kernel": fused})
    assert 0.05 < with_basis < 0.15
    assert error(latents(own, x)[0, 0], own) == pytest.approx(with_basis, rel=0.02)


def test_a_projection_of_lower_rank_has_finite_latents():
    rng = np.random.default_rng(3)
    kernel = jnp.asarray(rng.normal(size=(32, 8)), jnp.float32).at[:, 4:].set(0)
    x = jnp.asarray(rng.normal(size=(1, 5, 32)), jnp.float32)
    turned, singular = right_factors(kernel)
    own = {"input_kernel": kernel, "kernel": turned, "singular": singular}
    rows = latents(own, x)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(project(own, rows, 1)[:, 0], x @ kernel, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_weighted_values_need_no_values(biased: bool):
    """The sum taken among rows equals that among rebuilt values; few queries take the one, many the
    other."""
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(2, 1, 9, 48)), jnp.float32)
    own = {"kernel": jnp.asarray(rng.normal(size=(48, 16)), jnp.float32)}
    if biased:
        own["bias"] = jnp.asarray(rng.normal(size=16), jnp.float32)
    values = project(own, rows, 2)
    for queries in (1, 3, 8, 40):
        weights = jnp.asarray(rng.uniform(size=(2, 2, queries, 9)), jnp.float32)
        wanted = np.einsum("bkrt,bkth->bkrh", weights, values)
        assert worst(np.asarray(weighted_values(own, weights, rows)), wanted) < 1e-5, (
            f"{queries} queries"
        )
        assert worst(np.asarray(weighted_values(own, weights, rows[:, :, ::-1])), wanted) > 1e-2, (
            "another order of tokens passes"
        )


# --- the carry


def test_a_bfloat16_accumulator_is_near_the_float32_one():
    spec = "xquant_cl:bits=3,base_layer=0,group_size=16,accumulator_dtype="
    coarse, exact = (round_trips(spec + d, DIMS, *layers()) for d in ("bfloat16", "float32"))
    error = worst(coarse[-1][1], exact[-1][1])
    assert 1e-5 < error < 0.1, f"relative error {error:.1e}"
