"""Calibration: levels no worse than scikit-learn's k-means, thresholds and ranges as defined, bad
activations refused."""

import numpy as np
import pytest
from sklearn.cluster import KMeans

from kvq_jax.methods.kvquant import fit
from kvq_jax.methods.kvquant.kmeans import nearest, weighted_levels

TOKENS, HEADS, HEAD_DIM = 400, 2, 32
OPTIONS = {
    "levels": 8,
    "per_channel": True,
    "per_matrix": False,
    "outliers": 0.02,
    "per_side": 2,
    "weighting": "fisher_scale",
}


def activations(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_t(4, size=(TOKENS, HEADS, HEAD_DIM)) * np.exp(
        rng.normal(size=(HEADS, HEAD_DIM))
    ) + 2 * rng.normal(size=(HEADS, HEAD_DIM))
    return rows.astype(np.float32), (rng.standard_t(3, size=rows.shape) * 1e-5).astype(np.float32)


def numbers(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers in [-1, 1] and their weights."""
    rng = np.random.default_rng(3)
    drawn = {
        "normal": rng.normal(size=20000),
        "heavy tails": rng.standard_t(2, size=20000),
        "two humps": np.concatenate([rng.normal(-3, 0.3, 5000), rng.normal(2, 1.0, 15000)]),
        "few": rng.normal(size=60),
    }[kind]
    return (drawn / np.abs(drawn).max()).astype(np.float32), rng.gamma(0.2, size=drawn.size)


def distortion(y: np.ndarray, weights: np.ndarray | None, levels: np.ndarray) -> float:
    """Return sum_i w_i (y_i - nearest level)^2."""
    error = np.square(y.astype(np.float64) - levels[nearest(y, levels)])
    return float(error.sum() if weights is None else (weights * error).sum())


@pytest.mark.parametrize("entries", [4, 16])
@pytest.mark.parametrize("kind", ["heavy tails", "two humps", "few"])
def test_levels_are_no_worse_than_those_of_scikit_learn(kind: str, entries: int):
    y, weights = numbers(kind)
    model = KMeans(entries, random_state=0, n_init=1, max_iter=50).fit(
        y[:, None], sample_weight=weights
    )
    theirs = distortion(y, weights, np.sort(model.cluster_centers_[:, 0]))
    ours = distortion(y, weights, weighted_levels(y, weights, entries))
    assert ours <= 1.001 * theirs, f"distortion {ours / theirs:.4f} of scikit-learn's"
    evenly = distortion(y, weights, np.linspace(-1, 1, entries))
    assert evenly > 1.05 * theirs, "equally spaced levels would pass"


def test_fewer_numbers_than_levels_are_all_met():
    levels = weighted_levels(np.array([-0.5, 0.25, 0.25]), None, 8)
    assert distortion(np.array([-0.5, 0.25]), None, levels) < 1e-20
    assert np.all(np.diff(levels) >= 0)


def test_channel_thresholds_are_percentiles_and_ranges_those_of_what_is_left():
    rows, gradients = activations()
    found = fit.parameters(rows, gradients, **OPTIONS)
    lower, upper = np.percentile(rows, [1, 99], axis=0)
    np.testing.assert_allclose(found["lower"], lower, rtol=1e-6)
    np.testing.assert_allclose(found["upper"], upper, rtol=1e-6)
    kept = np.ma.masked_where((rows < lower) | (rows > upper), rows)
    for name, expected in (
        ("scale", (kept.max(0) - kept.min(0)) / 2),
        ("zero", (kept.max(0) + kept.min(0)) / 2),
    ):
        np.testing.assert_allclose(found[name], expected, atol=1e-5, err_msg=name)
    assert found["levels"].shape == (8,)
    assert np.all(np.abs(found["levels"]) <= 1)


def test_one_threshold_serves_a_whole_layer_where_asked():
    rows, gradients = activations()
    found = fit.parameters(rows, gradients, **{**OPTIONS, "per_matrix": True})
    assert np.unique(found["lower"]).size == np.unique(found["upper"]).size == 1
    assert found["upper"][0, 0] == pytest.approx(np.percentile(rows, 99), rel=1e-6)
    assert np.unique(found["scale"]).size > 1, "ranges still belong to channels"


@pytest.mark.parametrize("weighting", ["none", "fisher", "fisher_scale"])
def test_each_weighting_minimizes_its_own_distortion(weighting: str):
    rows, gradients = activations()
    kinds = ("none", "fisher", "fisher_scale")
    levels = {
        kind: fit.parameters(rows, gradients, **{**OPTIONS, "weighting": kind})["levels"]
        for kind in kinds
    }
    found = fit.parameters(rows, gradients, **OPTIONS)
    x, grad, scale = (
        rows.reshape(TOKENS, -1),
        gradients.reshape(TOKENS, -1).astype(np.float64),
        found["scale"].reshape(1, -1),
    )
    kept = (x >= found["lower"].reshape(1, -1)) & (x <= found["upper"].reshape(1, -1))
    y = ((x - found["zero"].reshape(1, -1)) / scale)[kept]
    weights = {"none": np.ones(x.shape), "fisher": grad**2, "fisher_scale": (grad * scale) ** 2}[
        weighting
    ][kept]
    own = distortion(y, weights, levels[weighting])
    for other in kinds:
        assert other == weighting or own < distortion(y, weights, levels[other]), (
            f"levels of {other} are as good"
        )


def test_qnorm_restores_mean_and_deviation():
    rows, gradients = activations()
    found = fit.parameters(rows, gradients, **{**OPTIONS, "levels": 4})
    x = rows.reshape(TOKENS, -1)
    kept = (x >= found["lower"].reshape(1, -1)) & (x <= found["upper"].reshape(1, -1))
    y = ((x - found["zero"].reshape(1, -1)) / found["scale"].reshape(1, -1))[kept]
    coded = found["levels"][np.abs(y[:, None] - found["levels"]).argmin(1)]
    stretch, shift = found["qnorm"]
    assert abs(coded.std() - y.std()) > 1e-3, "without Q-Norm the deviation shrinks"
    assert (coded * stretch + shift).std() == pytest.approx(y.std(), rel=1e-4)
    assert (coded * stretch + shift).mean() == pytest.approx(y.mean(), abs=1e-5)


def test_a_constant_channel_has_its_value_and_no_range():
    rows, gradients = activations()
    rows[:, 0, 5] = 3.5
    found = fit.parameters(rows, gradients, **OPTIONS)
    assert (found["scale"][0, 5], found["zero"][0, 5]) == (0, 3.5)
    assert np.isfinite(found["levels"]).all()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda rows, grad: rows.__setitem__((3, 0, 0), np.nan),
            r"activations are not finite \(1 of 25600\)",
        ),
        (lambda rows, grad: grad.__setitem__((3, 0, 0), np.inf), "gradients are not finite"),
        (lambda rows, grad: grad.__setitem__(slice(None), 0), "all gradients are 0"),
    ],
)
def test_activations_that_give_no_levels_are_refused(break_it, message: str):
    rows, gradients = activations()
    break_it(rows, gradients)
    with pytest.raises(ValueError, match=message):
        fit.parameters(rows, gradients, **OPTIONS)
