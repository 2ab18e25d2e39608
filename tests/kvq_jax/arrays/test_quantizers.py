"""The uniform quantizers: error bounds, and groups that hold nothing ordinary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import uniform

GROUP = 16
SCHEMES = ("asym", "sym", "hybrid")
DTYPES = ("float32", "float16", "bfloat16")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def quantized(x, scheme: str, bits: int, dtype: str):
    """Return (codes, scale, zero, decoded) of rows of groups [rows, GROUP], zero written out."""
    group = {"asym": uniform.asymmetric, "sym": uniform.symmetric, "hybrid": uniform.hybrid}[
        scheme
    ](x, bits, 1, jnp.dtype(dtype))
    if group.zero is None:
        implied = -(2**bits - 1) * group.scale.astype(jnp.float32)
        return (
            group.codes,
            group.scale,
            implied,
            group.codes.astype(jnp.float32) * group.scale.astype(jnp.float32) + implied,
        )
    return group.codes, group.scale, group.zero, uniform.dequantize(group)


def groups(count: int = 64, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(count, GROUP)) * 10.0 ** rng.integers(-3, 3, (count, 1))
        + rng.normal(size=(count, 1))
    ).astype(np.float32)


def decoded(
    x: np.ndarray, scheme: str = "asym", bits: int = 2, dtype: str = "float32"
) -> np.ndarray:
    return np.asarray(quantized(jnp.asarray(x, jnp.float32), scheme, bits, dtype)[3])


def ulp(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the distance from a stored number to the next one, fp64."""
    return np.abs(np.spacing(np.asarray(x).astype(jnp.dtype(dtype))).astype(np.float64))


def far_groups() -> np.ndarray:
    """Groups far from zero for their width, constant ones and tiny ones, and some that leave
    float16's range."""
    rng = np.random.default_rng(4)
    centre = np.array([0, 1e-6, 0.3, 100.03, -100.03, 2049, 30000, -32752, 60000], np.float32)[
        :, None, None
    ]
    width = np.array([0, 1e-7, 1e-3, 0.02, 1, 50], np.float32)[None, :, None]
    return (
        (centre + width * rng.uniform(-1, 1, (9, 6, GROUP))).reshape(-1, GROUP).astype(np.float32)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_half_a_step_or_what_rounding_moved_the_range(scheme: str, dtype: str):
    given = far_groups()
    limit = uniform.saturation_limit(jnp.dtype(dtype))
    x = np.clip(given, -limit, limit).astype(np.float64)
    for bits in (1, 2, 4, 8):
        scale, zero, found = (
            np.asarray(a, np.float64)
            for a in quantized(jnp.asarray(given), scheme, bits, dtype)[1:]
        )
        top = 2**bits - 1 if scheme == "asym" else 2 * (2**bits - 1)
        of_zero = 0 if scheme == "sym" else ulp(zero, dtype) / 2
        ends = of_zero + top * ulp(scale, dtype) / 2
        after = of_zero if scheme == "hybrid" else 0
        bound = (
            np.maximum(scale / 2, ends) + after + 4e-7 * (np.abs(x) + np.abs(zero))
        )  # of arithmetic in fp32
        assert (np.abs(found - x) <= bound).all(), (
            f"{bits=}: {(np.abs(found - x) - bound).max()} too much"
        )


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_hybrid_is_never_worse_than_either_scheme(bits: int):
    x = np.concatenate([groups(), np.abs(groups(seed=1)), groups(seed=2) + 5])
    hybrid, asym, sym = (
        np.abs(decoded(x, scheme, bits) - x).sum(axis=1) for scheme in ("hybrid", "asym", "sym")
    )
    slack = 1e-6 * np.abs(x).sum(axis=1)
    assert (hybrid <= np.minimum(asym, sym) + slack).all()
    assert (asym < sym - slack).any()
    assert (sym < asym - slack).any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_entries_that_are_not_finite_leave_the_others_alone(scheme: str):
    clean = np.linspace(-1, 2, GROUP, dtype=np.float32)[None]
    for bad, stands_for in ((np.inf, clean.max()), (-np.inf, clean.min()), (np.nan, 0.0)):
        spoilt = np.concatenate([clean, clean])
        spoilt[0, 5] = bad
        spoilt[1, 5] = np.clip(stands_for, clean.min(), clean.max())
        codes, scale, zero, x_hat = (
            np.asarray(a) for a in quantized(jnp.asarray(spoilt), scheme, 3, "float32")
        )
        np.testing.assert_array_equal(codes[0], codes[1], err_msg=f"{bad}")
        assert scale[0] == scale[1], f"{bad} enters the scale"
        assert np.isfinite(x_hat).all()


@pytest.mark.parametrize("scheme", ["asym", "hybrid"])
def test_the_largest_code_times_its_scale_is_finite_in_float16(scheme: str):
    """Kernels multiply the two in float16 before they add the zero point."""
    ends = np.array(
        [[65504.0, -65504.0], [32752.0, -32752.0], [32720.0, -32720.0], [1e30, -1e30]], np.float32
    )
    x = np.concatenate([ends, np.zeros((len(ends), GROUP - 2), np.float32)], axis=1)
    for bits in (1, 2, 3, 4, 5, 8):
        codes, scale, zero, found = (
            np.asarray(a) for a in quantized(jnp.asarray(x), scheme, bits, "float16")
        )
        with np.errstate(over="ignore"):
            product = codes.astype(np.float16) * scale
        assert np.isfinite(product).all(), f"{bits=}: scale {scale.max()}"
        assert np.isfinite(product + zero.astype(np.float16)).all()
        np.testing.assert_allclose(found[:, :2], np.clip(ends, -32720, 32720), rtol=2e-3)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(3) * np.float16(2 * 32752 / 3)), (
            "two bits over all of the range: the limit keeps nothing away"
        )


def test_rounding_is_half_to_even():
    x = np.array([[0.0, 0.5, 1.5, 2.5, 3.0] + [0.0] * (GROUP - 5)], np.float32)  # scale 1
    codes = np.asarray(quantized(jnp.asarray(x), "asym", 2, "float32")[0])
    np.testing.assert_array_equal(codes[0, :5], [0, 0, 2, 2, 3])
