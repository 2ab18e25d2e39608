"""OptR against NumPy that follows its equations: the losses, the choice of rotations, the body."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.rotations import rotation
from kvq_jax.codecs.codec import Side
from kvq_jax.codecs.learning import LayerTrace
from kvq_jax.methods.optr import fit
from tests.float64 import softmax
from tests.kvq_jax.methods.equations import (
    assert_nearly_all_agree,
    body_of,
    clipped,
    read_back,
    rounded,
)

HEADS, READERS, TOKENS, WINDOW, H, D, SINK = 2, 2, 40, 8, 16, 24, 3
DIMS = kvq.CacheDims(1, HEADS * READERS, HEADS, H, D)
SPEC = "optr:scale_dtype=float32,group_size=8,sink=0,recent=0,block=8"
ROUNDING = fit.Rounding(2, 8, 0.96)


def trace(texts: int = 4) -> LayerTrace:
    rng = np.random.default_rng(0)
    size = np.exp(rng.normal(size=(HEADS, H)))
    k, v = (
        (rng.normal(size=(texts, TOKENS, HEADS, H)) * part).astype(np.float32)
        for part in (size, size[::-1])
    )
    q = rng.normal(size=(texts, WINDOW, HEADS * READERS, H)).astype(np.float32)
    by_head = np.moveaxis(q.reshape(texts * WINDOW, HEADS, READERS, H), 1, 0).reshape(HEADS, -1, H)
    moments = np.swapaxes(by_head, 1, 2) @ by_head / by_head.shape[1]
    output = rng.normal(size=(HEADS * READERS * H, D)).astype(np.float32)
    return LayerTrace(k + 2 * size, v, q, moments.astype(np.float32), output, H**-0.5, SINK)


def coded(rows: np.ndarray, turn: np.ndarray, kept: float) -> np.ndarray:
    """Return what rows [T, H] read as: rotated, clipped, four levels for each 8 channels."""
    return rounded(clipped(rows @ turn, kept), 1, group=8) @ turn.T


def losses(layer: LayerTrace, texts: slice, k_turn: np.ndarray, v_turn: np.ndarray) -> np.ndarray:
    """Return [2, K]: the losses of keys and of values, by the equations, one query at a time."""
    mean = layer.keys.mean(axis=(0, 1))
    total = np.zeros((2, HEADS))
    numbers = range(*texts.indices(len(layer.keys)))
    for s in numbers:
        for head in range(HEADS):
            k = (layer.keys[s, :, head] - mean[head]).astype(np.float64)
            v = layer.values[s, :, head].astype(np.float64)
            inside = slice(SINK, TOKENS - WINDOW)
            k_read, v_read = k.copy(), v.copy()
            k_read[inside] = coded(k, k_turn[head], 0.96)[inside]
            v_read[inside] = coded(v, v_turn[head], 0.92)[inside]
            for reader in range(HEADS * READERS)[head * READERS : (head + 1) * READERS]:
                output = layer.output[reader * H : (reader + 1) * H]
                for w in range(WINDOW):
                    seen = TOKENS - WINDOW + w + 1
                    q = layer.queries[s, w, reader].astype(np.float64) * layer.scale
                    p, p_read = softmax(k[:seen] @ q), softmax(k_read[:seen] @ q)
                    shift = ((p_read - p) @ v[:seen]) @ output
                    away = (p_read @ (v_read - v)[:seen]) @ output
                    total[0, head] += np.sum(p * np.log(p / p_read)) + np.mean(shift**2)
                    total[1, head] += np.mean(away**2)
    return total / (len(numbers) * READERS * WINDOW)


def test_learned_rotations_have_a_smaller_loss_on_texts_that_were_not_learned_from():
    layer = trace()
    start = fit.keys(layer, ROUNDING, "hadamard", 0)["turn"]
    np.testing.assert_allclose(start, np.stack(2 * [rotation(H).T]))
    learned = fit.keys(layer, ROUNDING, "hadamard", 25)
    of_values = fit.values(layer, learned, ROUNDING, ROUNDING._replace(kept=0.92), "hadamard", 25)
    for turn in (learned["turn"], of_values["turn"]):
        product = np.swapaxes(turn, 1, 2) @ turn
        np.testing.assert_allclose(product, np.stack(2 * [np.eye(H)]), atol=1e-4)
    judged = slice(2, 4)
    before = losses(layer, judged, start, start)
    after = losses(layer, judged, learned["turn"], of_values["turn"])
    assert (after[0] <= before[0] * 1.001).all(), (before, after)
    assert after[0].sum() < 0.97 * before[0].sum(), (before, after)
    with_keys = losses(layer, judged, learned["turn"], start)
    assert (after[1] <= with_keys[1] * 1.001).all(), (with_keys, after)
    assert after[1].sum() < 0.97 * with_keys[1].sum(), (with_keys, after)


def test_the_losses_are_those_of_the_equations():
    layer = trace(2)
    turn = fit.keys(layer, ROUNDING, "oscar", 0)
    learning, judging = fit._texts(layer, turn["mean"])
    wanted = losses(layer, slice(1, 2), turn["turn"], turn["turn"])
    first = jnp.asarray(turn["turn"])
    of_keys = fit._key_loss(ROUNDING, first, judging)
    of_values = fit._value_loss(ROUNDING, ROUNDING._replace(kept=0.92), first, judging, first)
    np.testing.assert_allclose([of_keys, of_values], wanted, rtol=2e-3)
    other = np.asarray(fit._key_loss(ROUNDING, first, learning))
    assert np.abs(other / wanted[0] - 1).max() > 0.01, "another text would pass"


def test_the_base_is_the_papers_own_rotation():
    """Columns without the Hadamard matrix are eigenvectors of the queries' second moment, and of
    values weighted by the mean squares of their tokens' scores."""
    layer = trace()
    keys = fit.keys(layer, ROUNDING, "oscar", 0)
    values = fit.values(layer, keys, ROUNDING, ROUNDING, "oscar", 0)
    for head in range(HEADS):
        weighted = [
            (k @ layer.moments[head] @ k) * v
            for k, v in zip(
                layer.keys[:, :, head].reshape(-1, H),
                layer.values[:, :, head].reshape(-1, H),
                strict=True,
            )
        ]
        moments = layer.moments[head], np.asarray(weighted).T @ np.asarray(weighted)
        for turn, moment in zip((keys["turn"], values["turn"]), moments, strict=True):
            undone = (turn[head] @ rotation(H)).astype(np.float64)
            diagonal = undone.T @ moment @ undone
            off = np.abs(diagonal - np.diag(np.diag(diagonal))).max()
            assert off < 1e-3 * np.diag(diagonal).max()
            assert (np.diff(np.diag(diagonal)) <= 1e-3 * np.diag(diagonal).max()).all()


@pytest.mark.parametrize("side", ["k", "v"])
def test_bodies_hold_rows_without_their_mean_and_scores_have_it(side: Side):
    layer = trace()
    codec = getattr(kvq.parse(f"{SPEC},steps=1").layer(0, DIMS, TOKENS, "float32"), side)
    learned = codec.learning.fit_to_layer(layer)
    rows = np.moveaxis(layer.keys if side == "k" else layer.values, 2, 1)[0]
    read = read_back(codec, learned, rows)
    for head in range(HEADS):
        mean = learned["mean"][head] if side == "k" else 0
        kept = {"k": 0.96, "v": 0.92}[side]
        wanted = coded((rows[head] - mean).astype(np.float64), learned["turn"][head], kept)
        assert_nearly_all_agree(read[head], wanted + mean, 1e-3, share=0.05)
    if side == "k":
        params, body = body_of(codec, learned, rows)
        q = np.random.default_rng(1).normal(size=(1, HEADS, 3, H)).astype(np.float32)
        query = codec.query(params, (), jnp.asarray(q))
        scores = codec.scores(params, (), query, body, jnp.arange(TOKENS)[None], None)
        exact = np.einsum("bkrh,kch->bkrc", q, read)
        np.testing.assert_allclose(scores, exact, rtol=1e-4, atol=1e-3)
        without = np.einsum("bkrh,kch->bkrc", q, read - learned["mean"][:, None])
        assert np.abs(without - exact).max() > 0.1, "scores without the mean would pass"


def test_options_are_part_of_the_key_and_shares_are_checked():
    keys = {
        kvq.parse(f"{SPEC},steps={steps}").layer(0, DIMS, 32, "float32").k.learning.key
        for steps in (1, 2)
    }
    assert len(keys) == 2, "rotations of other steps are others"
    with pytest.raises(ValueError, match="v_kept=2: a share is between 0 and 1"):
        kvq.parse("optr:v_kept=2").layer(0, DIMS, 32, "float32")
    with pytest.raises(ValueError, match=r"kvq_models\.calibrate does so"):
        kvq.parameters.calibrate(SPEC, DIMS, 0, {}, {})
