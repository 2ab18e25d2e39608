"""The C++ product with packed weights: the definition, the rows beside a row, and arrays that do
not fit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cpu_kernels import library
from cpu_kernels.packed_product import packed_products

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)


def matrix(
    bits: int,
    group: int,
    inputs: int,
    outputs: int,
    *,
    coarse: bool,
    mins: bool | str,
    dtype: Any = np.float16,
) -> Any:
    """Return (codes, scales, coarse scales, minima, coarse minima), and the matrix [I, O]."""
    rng, panels = np.random.default_rng(0), -(-outputs // 32)
    values = rng.integers(0, 16, (panels, inputs, 32)) if bits == 4 else None
    values = rng.integers(-128, 128, (panels, inputs, 32)) if values is None else values
    codes: Any = values.astype(np.int8)
    if bits == 4:  # [P, runs, half, word, byte, lane] to the bits of words
        parts = values.reshape(panels, -1, 2, 4, 4, 32).astype(np.uint32)
        shifts = 4 * np.arange(2)[:, None, None, None] + 8 * np.arange(4)[:, None]
        codes = np.sum(parts << shifts.astype(np.uint32), axis=(2, 4), dtype=np.uint32)
        codes = codes.reshape(panels, -1, 32)
    else:
        codes = codes.reshape(panels, -1, 4, 32).swapaxes(2, 3)

    def factors():
        if not coarse:
            fine = rng.normal(size=(panels, inputs // group, 32)).astype(dtype)
            return fine, None, fine.astype(float)
        fine = rng.integers(-64, 64, (panels, inputs // group, 32)).astype(np.int8)
        outer = rng.normal(size=(panels, inputs // 256, 32)).astype(np.float16)
        return fine, outer, fine * np.repeat(outer.astype(float), 256 // group, axis=1)

    *stored, scale = factors()
    *minimum_codes, minimum = factors() if mins else (None, None, 0.0 * scale)
    if mins == "of scales":
        minimum_codes = [rng.integers(-15, 16, scale.shape).astype(np.int8), None]
        minimum = minimum_codes[0] * scale
    whole = values * np.repeat(scale, group, axis=1) + np.repeat(minimum, group, axis=1)
    arrays = tuple(
        None if array is None else jnp.asarray(array) for array in (codes, *stored, *minimum_codes)
    )
    return arrays, whole.transpose(1, 0, 2).reshape(inputs, -1)[:, :outputs]


@pytest.mark.parametrize(
    ("bits", "group", "coarse", "mins", "dtype"),
    [
        (4, 32, False, False, np.float16),
        (4, 32, False, True, np.float16),
        (4, 32, True, True, np.float16),
        (4, 32, False, "of scales", jnp.bfloat16),
        (8, 32, False, False, jnp.bfloat16),
        (8, 32, True, True, np.float16),
        (8, 16, True, False, np.float16),
        (8, 32, False, "of scales", np.float32),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 19])
def test_a_product_is_as_defined_and_a_row_has_the_same_bits_alone(
    bits: int, group: int, coarse: bool, mins: bool | str, dtype: Any, tokens: int
):
    inputs = 512 if coarse else 96
    arrays, w = matrix(bits, group, inputs, 72, coarse=coarse, mins=mins, dtype=dtype)
    check_product(lambda x: product(x, arrays, 72), w, tokens)


def check_product(multiply: Callable[[np.ndarray], np.ndarray], w: np.ndarray, tokens: int) -> None:
    """Check that a function of rows multiplies by [I, O] and gives a row the same bits alone."""
    x = np.random.default_rng(1).normal(size=(tokens, len(w))).astype(np.float32)
    y, want = multiply(x), x.astype(float) @ w
    assert np.linalg.norm(y - want) < 1e-6 * np.linalg.norm(want)
    less = want - x[:, 3:4].astype(float) * w[3]
    assert np.linalg.norm(y - less) > 1e-3 * np.linalg.norm(want), "an input left out passes"
    for t in range(tokens):
        np.testing.assert_array_equal(multiply(x[t : t + 1])[0], y[t])


def product(x: np.ndarray, arrays, outputs: int, digits: int = 3) -> np.ndarray:
    [y] = packed_products(jnp.asarray(x), [arrays], outputs=[outputs], centres=[0], digits=digits)
    return np.asarray(y)


@pytest.mark.parametrize("tokens", [1, 3])
def test_one_call_multiplies_by_several_matrices_as_calls_of_their_own_do(tokens: int):
    kinds = [(4, 32, True), (8, 32, False), (4, 32, True), (4, 32, False)]
    made = [matrix(b, g, 64, 40 + i, coarse=False, mins=m) for i, (b, g, m) in enumerate(kinds)]
    x = np.random.default_rng(3).normal(size=(tokens, 64)).astype(np.float32)
    outputs, centres = [40, 41, 42, 43], [0, 0, 0, 8]
    together = packed_products(
        jnp.asarray(x), [arrays for arrays, _ in made], outputs=outputs, centres=centres
    )
    for i, (arrays, _) in enumerate(made[:3]):
        np.testing.assert_array_equal(together[i], product(x, arrays, outputs[i]))
    arrays, w = made[3]
    scales = np.repeat(np.asarray(arrays[1], float), 32, axis=1)  # [P, I, 32]
    want = x @ (w - 8 * scales.transpose(1, 0, 2).reshape(64, -1)[:, :43])
    np.testing.assert_allclose(together[3], want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("bits", "group", "coarse"), [(4, 32, False), (8, 16, True)])
def test_one_digit_rounds_activations_to_eight_bits_of_their_group(
    bits: int, group: int, coarse: bool
):
    arrays, w = matrix(bits, group, 512 if coarse else 96, 72, coarse=coarse, mins=bits == 4)
    x = np.random.default_rng(1).normal(size=(3, len(w))).astype(np.float32)
    by_group = x.reshape(3, -1, group)
    scale = np.abs(by_group).max(axis=-1, keepdims=True) / 127
    want = (np.round(by_group / scale) * scale).reshape(x.shape).astype(float) @ w
    y = product(x, arrays, 72, digits=1)
    assert np.linalg.norm(y - want) < 1e-5 * np.linalg.norm(want)
    assert np.linalg.norm(y - x @ w) > 1e-3 * np.linalg.norm(want), "nothing is rounded"
    for t in range(3):
        np.testing.assert_array_equal(product(x[t : t + 1], arrays, 72, digits=1)[0], y[t])


def test_tiny_and_large_activations_are_finite():
    arrays, w = matrix(4, 32, 64, 40, coarse=False, mins=True)
    x = np.concatenate([np.full((1, 64), 1e-38), np.full((1, 64), 3e30)]).astype(np.float32)
    y = product(x, arrays, 40)
    assert np.abs(y[0]).max() < 1e-34
    np.testing.assert_allclose(y[1], 3e30 * w.sum(axis=0), rtol=1e-4, atol=1e27)


def test_nan_in_a_row_stays_in_its_row():
    arrays, w = matrix(4, 32, 64, 40, coarse=False, mins=True)
    check_nan(lambda x: product(x, arrays, 40), w)


def check_nan(multiply: Callable[[np.ndarray], np.ndarray], w: np.ndarray) -> None:
    """Check that nan in a row stays in its row."""
    x = np.ones((9, len(w)), np.float32)
    x[4, 7] = np.nan
    y = multiply(x)
    assert np.isnan(y[4]).all()
    assert np.isfinite(np.delete(y, 4, axis=0)).all()


@pytest.mark.parametrize("digits", [1, 3])
@pytest.mark.parametrize("filled", [[], [2], [0, 3, 4], [8], list(range(1, 19))])
def test_rows_of_zeros_are_skipped_and_change_no_bit_of_the_others(filled: list[int], digits: int):
    arrays, w = matrix(4, 32, 64, 40, coarse=False, mins=True)
    x = np.zeros((19, len(w)), np.float32)
    x[filled] = np.random.default_rng(4).normal(size=(len(filled), len(w)))
    y = product(x, arrays, 40, digits)
    others = np.setdiff1d(np.arange(len(x)), filled)
    np.testing.assert_array_equal(y[others], 0)
    for t in filled:
        np.testing.assert_array_equal(y[t], product(x[t : t + 1], arrays, 40, digits)[0])
        assert y[t].any()
    broken = (arrays[0], arrays[1] * jnp.nan, *arrays[2:])
    y = product(x, broken, 40, digits)
    np.testing.assert_array_equal(y[others], 0, "rows of zeros were multiplied")
    assert np.isnan(y[filled]).all()


def test_a_mapped_product_is_the_product_of_each():
    arrays, w = matrix(8, 32, 64, 32, coarse=False, mins=False)
    x = np.random.default_rng(2).normal(size=(3, 2, len(w))).astype(np.float32)
    mapped = jax.vmap(lambda rows: packed_products(rows, [arrays], outputs=[32], centres=[0])[0])(
        jnp.asarray(x)
    )
    flat = product(x.reshape(6, -1), arrays, 32)
    np.testing.assert_array_equal(mapped.reshape(6, -1), flat)


@pytest.mark.parametrize(
    ("change", "outputs", "message"),
    [
        ({}, 40, "codes must be"),
        ({0: np.zeros((1, 64, 32), np.int16)}, 32, "codes must be u32, s8"),
        ({1: np.zeros((1, 3, 32), np.float16)}, 32, "scales and minima must be"),
        ({1: np.zeros((1, 2, 32), np.int8)}, 32, "coarse scales must be"),
        ({3: np.zeros((1, 2, 32), np.int32)}, 32, "must be float16, bfloat16, float32, int8"),
    ],
)
def test_arrays_that_do_not_fit_are_an_error_of_xla(change: dict, outputs: int, message: str):
    arrays, w = matrix(8, 32, 64, 32, coarse=False, mins=False)
    changed: list[Any] = [
        jnp.asarray(change[i]) if i in change else array for i, array in enumerate(arrays)
    ]
    with pytest.raises(Exception, match=message):
        product(np.ones((1, 64), np.float32), changed, outputs)


def test_numbers_of_fp8_have_their_values():
    rng = np.random.default_rng(5)
    codes = rng.permutation(np.tile(np.arange(256, dtype=np.uint8), 8)).reshape(1, 64, 32)
    codes[codes & 127 == 127] = 0  # NaN
    numbers = codes.view(ml_dtypes.float8_e4m3fn)
    scales = rng.normal(size=(1, 2, 32)).astype(np.float32)
    arrays = [jnp.asarray(numbers.reshape(1, 16, 4, 32).swapaxes(2, 3)), jnp.asarray(scales)]
    w = (numbers.astype(float) * np.repeat(scales, 32, axis=1))[0]
    y = product(np.eye(64, dtype=np.float32), [*arrays, None, None, None], 32)
    np.testing.assert_allclose(y, w, rtol=1e-6)
    assert np.unique(np.abs(y)).size > 1000, "numbers are not told apart"


def test_codes_of_levels_have_their_values_and_no_centre_or_minima():
    rng = np.random.default_rng(6)
    arrays, _ = matrix(4, 32, 64, 40, coarse=False, mins=True)
    integers = matrix(4, 32, 64, 40, coarse=False, mins=False)[1]
    scales = np.repeat(np.asarray(arrays[1], float), 32, axis=1).transpose(1, 0, 2).reshape(64, -1)
    levels = rng.normal(size=16).astype(np.float32)
    codes = np.round(integers / scales[:, :40]).astype(int)
    x = rng.normal(size=(3, 64)).astype(np.float32)

    def of_levels(*stored: Any, centre: int = 0) -> np.ndarray:
        options = dict(outputs=[40], centres=[centre], levels=[levels.tolist()])
        return np.asarray(packed_products(jnp.asarray(x), [stored], **options)[0])

    y, want = of_levels(*arrays[:3], None, None), x @ (levels[codes] * scales[:, :40])
    assert np.linalg.norm(y - want) < 1e-6 * np.linalg.norm(want)
    assert np.linalg.norm(y - x @ integers) > 0.1 * np.linalg.norm(want), "levels are not read"
    with pytest.raises(Exception, match="without centre and minima"):
        of_levels(*arrays)
    with pytest.raises(Exception, match="without centre and minima"):
        of_levels(*arrays[:3], None, None, centre=8)
    with pytest.raises(Exception, match="levels are for codes of 4 bits"):
        of_levels(jnp.ones((2, 64, 32), jnp.bfloat16), None, None, None, None)


@pytest.mark.usefixtures("types_unchecked")
def test_levels_may_be_an_array():
    arrays, _ = matrix(4, 32, 64, 40, coarse=False, mins=False)
    levels: Any = np.arange(16.0)[None]
    options: dict[str, Any] = dict(outputs=[40], centres=[0])
    [one], [other] = (
        packed_products(jnp.ones((1, 64)), [arrays], levels=stored, **options)
        for stored in (levels, levels.tolist())
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_centre_that_changes_nothing_is_an_error(bits: int):
    arrays, _ = matrix(bits, 32, 64, 40, coarse=False, mins=False)
    x = jnp.ones((1, 64))
    for centre in (7.5, 8, 16, -1, np.nan):
        options: dict[str, Any] = dict(outputs=[40], centres=[centre])
        if (bits, centre) == (4, 8):
            packed_products(x, [arrays], **options)
            continue
        with pytest.raises(Exception, match=r"a centre is for|centres must be integers"):
            packed_products(x, [arrays], **options)


def test_a_row_becomes_fp32():
    arrays, w = matrix(4, 32, 64, 40, coarse=False, mins=False)
    x = jnp.ones((1, 64), jnp.bfloat16)
    options: dict[str, Any] = dict(outputs=[40], centres=[0])
    [y], [want] = (packed_products(rows, [arrays], **options) for rows in (x, x.astype("float32")))
    np.testing.assert_array_equal(y, want)


def test_an_expert_that_does_not_exist_is_an_error():
    arrays, _ = matrix(4, 32, 64, 40, coarse=False, mins=False)
    stacks = [None if a is None else jnp.concatenate([a, a]) for a in arrays]
    options: dict[str, Any] = dict(outputs=[40], centres=[0], experts=2)
    with pytest.raises(Exception, match="from 0 to experts - 1"):
        packed_products(jnp.ones((1, 64)), [stacks], chosen=jnp.array([2]), **options)
