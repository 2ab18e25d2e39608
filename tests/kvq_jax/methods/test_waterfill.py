"""Waterfill against a version in plain NumPy, and what its calibration and its widths promise."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import run_array
from kvq_jax.arrays.reverse_water_filling import STEPS
from kvq_jax.arrays.rotations import rotation, turn, turn_back
from kvq_jax.arrays.run_array import RunFormat
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.runs import RunsCodec
from kvq_jax.methods.waterfill import Waterfill, fit, matrices
from kvq_jax.methods.waterfill.codec import EigenKeyCodec, KeyCodec, RotatedValueCodec, ValueCodec
from tests.kvq_jax.methods.equations import read_back

HEADS, WIDTH, TOKENS, BLOCK = 2, 16, 64, 32
WIDTHS = (6, 3, 1, 0)


def correlated(seed: int, tokens: int = 400) -> np.ndarray:
    """Return rows [tokens, K, H] of channels that differ in variance, are correlated, and have a
    mean."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(HEADS, WIDTH, WIDTH)) * 2.0 ** -np.linspace(0, 1, WIDTH)
    return (
        np.einsum("tkc,kdc->tkd", rng.normal(size=(tokens, HEADS, WIDTH)), mixing)
        + rng.normal(size=(HEADS, WIDTH))
    ).astype(np.float32)


def decoded_in_numpy(
    u: np.ndarray, widths: tuple[int, ...], *, unbiased: bool = False
) -> np.ndarray:
    """Return what sorted, normalized channels [..., H] decode to: the nearest of each channel's
    levels, element by element."""
    chunk, out = u.shape[-1] // len(widths), np.zeros_like(u, np.float64)
    stored = sum(chunk for width in widths if width)
    for token in np.ndindex(u.shape[:-1]):
        row = u[token].astype(np.float64)
        size = math.sqrt(sum(x * x for x in row[:stored]) / stored)
        for channel in range(stored):
            width = widths[channel // chunk]
            if width >= 5:
                size = max(size, abs(row[channel]) / (2 ** (width - 1) * STEPS[width]))
        g = 2.0 ** (round(8 * math.log2(size)) / 8)
        for channel in range(stored):
            width = widths[channel // chunk]
            levels = [(2 * level + 1 - 2**width) / 2 * STEPS[width] for level in range(2**width)]
            out[token][channel] = g * min(levels, key=lambda level: abs(level - row[channel] / g))
        if unbiased:
            size = g * min(2, row[:stored] @ row[:stored] / (row @ out[token]))
            out[token] *= 2.0 ** (round(8 * math.log2(size)) / 8) / g
    return out


def spiked(rows: np.ndarray) -> np.ndarray:
    """Return the first TOKENS rows, every fourth with an entry that bounds its scale."""
    rows = rows[:TOKENS].copy()
    rows[::4, :, 3] *= 30
    return rows


def stored_rows(codec: RunsCodec, fitted: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return the rows [TOKENS, K, H] that the codec's body gives back, with the parameters that a
    model carries of fitted ones."""
    params = codec.learning.carry(jax.tree.map(jnp.asarray, fitted))
    return np.moveaxis(read_back(codec, params, np.moveaxis(rows, 0, 1)), 0, 1)


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Compare decoded rows. A code may fall on the other side of a border, or a scale on the next
    step, where fp32 rounds it there."""
    off = np.abs(found - wanted) > 1e-4 * np.abs(wanted).max()
    return bool(off.any(axis=(-1, -2)).mean() <= 0.02)


def test_keys_equal_the_numpy_version():
    rows = correlated(1)
    params = fit.keys(rows, correlated(2))
    rows = spiked(rows)
    mean, wanted = rows.astype(np.float64) - params["mean"], np.empty(rows.shape)
    for head, token in itertools.product(range(HEADS), range(TOKENS)):
        pairs = sorted(range(WIDTH // 2), key=lambda pair: params["place"][head, pair])
        order = [channel for pair in pairs for channel in (pair, pair + WIDTH // 2)]
        u = (mean[token, head] / params["scale"][head])[order]
        wanted[token, head, order] = decoded_in_numpy(u[None], WIDTHS)[0]
    wanted = wanted * params["scale"] + params["mean"]
    codec = KeyCodec(RunFormat(WIDTH, BLOCK, WIDTHS))
    assert same(stored_rows(codec, params, rows), wanted)
    turned = params | {"place": np.roll(params["place"], 2, axis=-1)}
    assert not same(stored_rows(codec, turned, rows), wanted), (
        "another order of channels gives the same rows"
    )


@pytest.mark.parametrize("kind", [ValueCodec, EigenKeyCodec])
def test_rows_in_an_eigenbasis_equal_the_numpy_version(kind: type[RunsCodec]):
    rows = correlated(3)
    params = fit.eigenbasis(rows, correlated(4))
    rows, codec = spiked(rows), kind(RunFormat(WIDTH, BLOCK, WIDTHS))
    wanted = np.empty(rows.shape)
    for head in range(HEADS):
        mean, synthesis = params["mean"][head], params["synthesis"][head]
        u = (rows[:, head].astype(np.float64) - mean) @ params["analysis"][head]
        wanted[:, head] = decoded_in_numpy(u, WIDTHS) @ synthesis + mean
    assert same(stored_rows(codec, params, rows), wanted)
    for other in ({"synthesis": params["synthesis"][:, ::-1]}, {"mean": params["mean"] + 1}):
        assert not same(stored_rows(codec, params | other, rows), wanted), f"other {other.keys()}"
    assert codec.facts.form == ("before_rope" if kind is EigenKeyCodec else "vectors")


def test_a_model_carries_matrices_of_16_bits_whose_channels_have_units():
    fitted = fit.eigenbasis(correlated(12), correlated(13))
    wanted = {name: fitted[name] * 1.0 for name in matrices.CHANNELS}
    for name, axis in matrices.CHANNELS.items():  # channels of very different sizes, and one of 0
        sizes = np.expand_dims(10.0 ** np.linspace(-9, 9, WIDTH), -3 - axis)
        wanted[name] = np.float32(fitted[name] * sizes)
        wanted[name].swapaxes(axis, -1)[..., 5] = 0
    params = matrices.stored(jax.tree.map(jnp.asarray, wanted))
    read = {"analysis": matrices.analysis(params), "synthesis": matrices.synthesis(params)}
    for name, axis in matrices.CHANNELS.items():
        assert params[name].dtype == jnp.int16
        largest = np.abs(wanted[name]).max(axis=-3 - axis, keepdims=True)
        error = np.abs(np.asarray(read[name]) - wanted[name])
        assert (error <= 1.6e-5 * largest).all(), name
        assert (error > 1e-6 * largest).any(), f"{name} is exact, so the limit checks nothing"
    described = EigenKeyCodec(RunFormat(WIDTH, BLOCK, WIDTHS)).learning.carried(HEADS)
    carried = EigenKeyCodec(RunFormat(WIDTH, BLOCK, WIDTHS)).learning.carry(
        jax.tree.map(jnp.asarray, fitted)
    )
    assert {name: (spec.shape, spec.dtype) for name, spec in described.items()} == {
        name: (array.shape, array.dtype.name) for name, array in carried.items()
    }
    np.testing.assert_array_equal(
        np.asarray(matrices.synthesis(carried, 8)), np.asarray(matrices.synthesis(carried))[:, :8]
    )


def test_rotated_values_equal_the_numpy_version():
    rows, codec = spiked(correlated(10)), RotatedValueCodec(RunFormat(WIDTH, BLOCK, WIDTHS))
    turned = rows.astype(np.float64) @ rotation(WIDTH).T
    wanted = decoded_in_numpy(turned, WIDTHS, unbiased=True) @ rotation(WIDTH)
    assert same(stored_rows(codec, {}, rows), wanted)
    biased = decoded_in_numpy(turned, WIDTHS) @ rotation(WIDTH)
    assert not same(stored_rows(codec, {}, rows), biased), "the scale is that of other runs"
    assert not same(stored_rows(codec, {}, rows), decoded_in_numpy(rows, WIDTHS, unbiased=True)), (
        "values are not rotated"
    )


def test_errors_of_rotated_values_are_orthogonal_to_each_value():
    rows = np.random.default_rng(11).normal(size=(HEADS, 256, 64)).astype(np.float32)
    format = RunFormat(64, BLOCK, (2,))

    def along(read: np.ndarray) -> float:
        return float(np.mean((rows * read).sum(-1) / np.square(rows).sum(-1)))

    read = read_back(RotatedValueCodec(format), {}, rows)
    assert along(read) == pytest.approx(1, abs=5e-3)
    plain = run_array.quantize(turn(jnp.asarray(rows[None])), format)
    u = run_array.levels(plain) * run_array.factor(plain.scale)
    assert along(np.asarray(turn_back(u)[0])) < 0.93, "other scales make errors along the value"


def test_values_in_a_rotation_have_equal_widths_and_need_no_calibration():
    dims = CacheDims(2, 2, 1, 32, 64)
    steep = {"energies": 4.0 ** -np.arange(32.0)[None]}
    method = kvq.parse("waterfill:bits=2.5,key_basis=eigen,value_basis=rotation").k
    assert isinstance(method, Waterfill)
    fitted = method.fitted({"k": [steep, steep], "v": [steep, steep]}, dims)
    assert isinstance(fitted, Waterfill)
    assert fitted == method.fitted({"k": [steep, steep]}, dims), "values' energies do not matter"
    keys, values = (fitted.widths(side, 0, dims) for side in ("k", "v"))
    assert values == (3, 2, 2, 2), "half of the budget of 18"
    assert sum(keys) == 9, "the other half"
    assert keys[0] > values[0], "keys have theirs by energies"
    assert method.fitted({}, dims) == method, "nothing is filled in without a calibration"
    codec = fitted.codec("v", 0, dims, BLOCK, "float32")
    assert not codec.learning.parameters(HEADS), "values need parameters"
    assert fitted.predicted_divergence({"k": [steep, steep]}, dims) is None


def test_pairs_are_sorted_by_their_fisher_information_and_have_a_variance_of_one():
    rows, gradients = correlated(5), correlated(6)
    params = fit.keys(rows, gradients)
    u = (rows - params["mean"]) / params["scale"]
    half = WIDTH // 2

    def of_pairs(x: np.ndarray) -> np.ndarray:
        """Return the mean square of each head's pairs of channels, [K, H / 2]."""
        return (x[..., :half] ** 2 + x[..., half:] ** 2).mean(axis=0) / 2

    np.testing.assert_allclose(of_pairs(u), 1, rtol=1e-4)
    energies = of_pairs(rows - rows.mean(axis=0)) * of_pairs(gradients)
    np.testing.assert_allclose(params["energies"], -np.sort(-energies), rtol=1e-4)
    first, second = np.split(params["place"], 2, axis=-1)
    np.testing.assert_array_equal(second - first, 1, "the channels of a pair are apart")
    for head in range(HEADS):
        np.testing.assert_array_equal(np.sort(params["place"][head]), np.arange(WIDTH))


def test_the_eigenbasis_of_values_makes_errors_of_channels_cost_what_their_energies_say():
    rows, gradients = correlated(7), correlated(8)
    params = fit.eigenbasis(rows, gradients)
    for head in range(HEADS):
        analysis, synthesis, energies = (
            params[name][head].astype(np.float64) for name in ("analysis", "synthesis", "energies")
        )
        np.testing.assert_allclose(analysis @ synthesis, np.eye(WIDTH), atol=1e-3)
        u = (rows[:, head] - params["mean"][head]) @ analysis
        np.testing.assert_allclose(np.cov(u.T, bias=True), np.eye(WIDTH), atol=1e-2)
        slopes = gradients[:, head].astype(np.float64)
        metric = slopes.T @ slopes / len(slopes)
        metric += fit.RIDGE * np.trace(metric) / WIDTH * np.eye(WIDTH)
        np.testing.assert_allclose(
            synthesis @ metric @ synthesis.T, np.diag(energies), atol=1e-3 * energies[0]
        )
        assert (np.diff(energies) <= 0).all()


@pytest.mark.parametrize("bits", [1.5, 2.5, 4.0])
@pytest.mark.parametrize(
    "dims", [CacheDims(2, 4, 2, 64, 256), CacheDims(2, 4, 2, 128, 512)], ids=["64", "128"]
)
def test_a_budget_is_what_is_stored(bits: float, dims: CacheDims):
    assert kvq.size.body_bits_per_element(f"waterfill:bits={bits}", dims) == pytest.approx(
        bits, abs=1 / 16
    )
    assert kvq.size.body_bits_per_element(f"waterfill:bits={bits}", dims) <= bits


@pytest.mark.parametrize("side", [fit.keys, fit.eigenbasis])
def test_rows_that_determine_nothing_are_refused(side):
    rows = correlated(9, 8)
    for bad, words in (
        ((rows[:1], rows[:1]), "too few"),
        ((rows * np.nan, rows), "activations are not finite"),
        ((rows, rows * np.inf), "gradients are not finite"),
        ((rows, rows * 0), "gradients are 0"),
    ):
        with pytest.raises(ValueError, match=words):
            side(*bad)


def test_a_calibration_decides_the_widths_that_a_spec_leaves_open():
    dims = CacheDims(3, 2, 1, 32, 64)
    steep, flat = ({"energies": np.array([factor ** -np.arange(16.0)])} for factor in (4.0, 1.1))
    twice = {"energies": np.repeat(flat["energies"], 2, axis=-1)}
    method = kvq.parse("waterfill:bits=2.25").k
    fitted = method.fitted({"k": [steep, flat, {}], "v": [twice, twice, {}]}, dims)
    spec = kvq.cache.CacheSpec(fitted, fitted, 32, 96, 32)
    assert kvq.parse(str(spec)) == spec
    plans = kvq.cache.layout(spec, dims, 1, 256).plans
    keys, values = (
        [[int(digit) for digit in codec.describe()["widths"]] for codec in side]
        for side in zip(*(p.codecs for p in plans), strict=True)
    )
    assert keys[0][0] > keys[1][0], "steeper energies ask for less equal widths"
    assert keys[0][-1] < keys[1][-1], "steeper energies ask for less equal widths"
    assert values[0] == values[1], "equal energies ask for equal widths"
    assert {sum(own) for own in (*keys, *values)} == {8}, (
        "every side of every layer has the same budget"
    )
    assert kvq.size.body_bits_per_element(spec, dims) == 2.25
    assert fitted.fitted({"k": [flat] * 3, "v": [flat] * 3}, dims) == fitted, (
        "widths that a spec gives stay"
    )


def test_the_sides_of_a_layer_share_their_bits_if_keys_have_an_eigenbasis():
    dims = CacheDims(2, 2, 1, 32, 64)
    much, little, nothing = (
        {"energies": scale * 4.0 ** -np.arange(32.0)[None] + 1e-30} for scale in (1.0, 1e-2, 0.0)
    )
    method = kvq.parse("waterfill:bits=2.25,key_basis=eigen").k
    assert isinstance(method, Waterfill)
    fitted = method.fitted({"k": [much, much], "v": [little, nothing]}, dims)
    assert isinstance(fitted, Waterfill)
    sides = [[fitted.widths(side, layer, dims) for side in ("k", "v")] for layer in range(2)]
    assert [sum(map(sum, layer)) for layer in sides] == [16, 16], "the budget of both sides"
    assert sum(sides[0][0]) > sum(sides[0][1]) > 1, "more bits for the side whose errors cost more"
    assert sum(sides[1][1]) == 1, "a side whose errors cost nothing is stored nonetheless"
    spec = kvq.cache.CacheSpec(fitted, fitted, 32, 96, 32)
    assert kvq.parse(str(spec)) == spec
    assert kvq.size.body_bits_per_element(spec, dims) == 2.25
