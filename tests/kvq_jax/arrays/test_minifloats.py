"""Small floats equal those of ml_dtypes, and blocks follow the specifications of their formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import float_array
from kvq_jax.arrays.float_array import FloatFormat
from kvq_jax.arrays.minifloats import E2M1, E4M3, Minifloat, decode, encode

DTYPES = [
    pytest.param(E4M3, ml_dtypes.float8_e4m3fn, id="e4m3"),
    pytest.param(E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
]
DIMS = kvq.CacheDims(1, 2, 2, 32, 64)
to_codes, to_numbers = (jax.jit(function, static_argnums=1) for function in (encode, decode))


def levels_of(dtype: type) -> np.ndarray:
    """Return all finite numbers of a dtype by their codes, NaN for the others."""
    return (
        np.arange(2 ** ml_dtypes.finfo(dtype).bits, dtype=np.uint8).view(dtype).astype(np.float32)
    )


@pytest.mark.parametrize(("format", "dtype"), DTYPES)
def test_every_code_stands_for_the_number_that_ml_dtypes_says(format: Minifloat, dtype: type):
    wanted = levels_of(dtype)
    found = np.asarray(to_numbers(jnp.arange(len(wanted), dtype=jnp.uint16), format))
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[finite], wanted[finite])
    np.testing.assert_array_equal(np.signbit(found[finite]), np.signbit(wanted[finite]))
    assert np.abs(found[finite]).max() == format.largest


@pytest.mark.parametrize(("format", "dtype"), DTYPES)
def test_rounding_is_that_of_ml_dtypes(format: Minifloat, dtype: type):
    """At every level, at every tie and one unit beside it, and for numbers of all sizes inside the
    range."""
    levels = np.unique(levels_of(dtype)[np.isfinite(levels_of(dtype))])
    ties = (levels[1:] + levels[:-1]) / 2
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=5000) * np.exp(4 * rng.normal(size=5000))
    x = np.concatenate(
        [
            levels,
            ties,
            np.nextafter(ties, np.float32(np.inf)),
            np.nextafter(ties, np.float32(-np.inf)),
            drawn,
        ]
    )
    x = np.clip(x, -format.largest, format.largest).astype(np.float32)
    found, wanted = (
        np.asarray(to_numbers(to_codes(x, format), format)),
        x.astype(dtype).astype(np.float32),
    )
    np.testing.assert_array_equal(found, wanted)
    assert (
        found != np.where(np.isin(x, ties), np.nextafter(x, 0), x).astype(dtype).astype(np.float32)
    ).any(), "no tie is decided"


@pytest.mark.parametrize(("format", "dtype"), DTYPES)
def test_what_is_too_large_saturates_and_nan_is_zero(format: Minifloat, dtype: type):
    x = jnp.asarray([1e30, -1e30, jnp.inf, -jnp.inf, jnp.nan, -0.0, 1e-30])
    np.testing.assert_array_equal(
        to_numbers(to_codes(x, format), format), format.largest * np.array([1, -1, 1, -1, 0, 0, 0])
    )


def rows(seed: int = 0) -> np.ndarray:
    """Rows [1, 2, 8, 32] whose entries have sizes from 1e-4 to 1e4, and one block of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1, 2, 8, 32)) * 10.0 ** rng.integers(-4, 5, size=(1, 2, 8, 1))
    x[0, 0, 0] = 0
    return x.astype(np.float32)


def test_mxfp4_blocks_are_those_of_the_specification():
    """Scale 2^(floor(log2 max) - 2), elements of ml_dtypes, saturating, in blocks of 32."""
    x = rows()
    body = float_array.quantize(jnp.asarray(x), FloatFormat(E2M1, 32, 8, "e8m0", 32))
    largest = np.abs(x).max(axis=-1)
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2
    scale = np.asarray(body.scale)[:, :, 0].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(scale[largest > 0], 2.0 ** exponent[largest > 0])
    wanted = (
        np.clip(x / 2.0 ** exponent[..., None], -6, 6)
        .astype(ml_dtypes.float4_e2m1fn)
        .astype(np.float32)
        * 2.0 ** exponent[..., None]
    )
    np.testing.assert_array_equal(float_array.dequantize(body), wanted)
    assert (np.abs(x / 2.0 ** exponent[..., None]) > 6).any(), "no element saturates"


def test_nvfp4_blocks_have_e4m3_scales_and_codes_against_them_as_stored():
    x = rows(1)
    body = float_array.quantize(jnp.asarray(x), FloatFormat(E2M1, 32, 8, "e4m3", 16))
    blocks = x.reshape(1, 2, 8, 2, 16)
    scale = (
        np.clip(np.abs(blocks).max(axis=-1, keepdims=True) / 6, 0, 448)
        .astype(ml_dtypes.float8_e4m3fn)
        .astype(np.float32)
    )
    stored = (
        np.swapaxes(np.asarray(body.scale), 2, 3)[..., None]
        .view(ml_dtypes.float8_e4m3fn)
        .astype(np.float32)
    )
    np.testing.assert_array_equal(stored, scale)
    safe = np.where(scale == 0, 1, scale)
    wanted = (
        np.clip(blocks / safe, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    )
    np.testing.assert_array_equal(float_array.dequantize(body), wanted.reshape(x.shape))
    assert (scale == 0).any(), "no scale is too small for E4M3"
    assert (scale == 448).any(), "no scale saturates"


def test_scales_are_those_of_all_heads_or_of_each():
    cache = {
        scale: kvq.cache.layout(f"fp8:scale={scale}", DIMS, 1, 64).plans[0].k
        for scale in ("tensor", "head")
    }
    k = jnp.asarray([1.0, 4.0])[None, :, None, None] * jnp.ones((1, 2, 3, 32))
    inputs = kvq.types.LayerInputs(
        None, None, k, None, k, k, jnp.arange(3)[None], jnp.ones((1, 3), bool), None
    )
    found = {
        scale: np.asarray(codec.statistics.of((), inputs)).ravel() for scale, codec in cache.items()
    }
    np.testing.assert_allclose(found["tensor"], 2 * 4 / 448 * np.ones(2), rtol=1e-6)
    np.testing.assert_allclose(found["head"], 2 * np.array([1, 4]) / 448, rtol=1e-6)


def test_a_head_that_is_not_whole_blocks_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"\Amxfp4 has blocks of 32 channels, which do not divide head_dim 80\Z"
    ):
        kvq.init_cache("mxfp4", kvq.CacheDims(1, 2, 2, 80, 160), 1, 64)
    kvq.cache.layout("nvfp4", kvq.CacheDims(1, 2, 2, 80, 160), 1, 64)
