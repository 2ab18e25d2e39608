"""KVQuant's ranges and thresholds of channels from each sequence's own prompt (Table 14, online):
what they are, and where they serve."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.methods.kvquant import fit
from kvq_jax.methods.kvquant.codec import RANGES
from tests.kvq_jax.layer_runs import DIMS, empty, parameters_of, sequences
from tests.kvq_jax.origins import PROMPT

SPEC = "kvquant:outliers=0.1,sink=3,block=16,channel_ranges=prompt"
LENGTHS = np.asarray([60, 33, 1, 0], np.int32)


def statistics(
    outliers: float = 0.1, spoil: Sequence[tuple[int, float]] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """(keys of a ragged batch of prompts, what they give), where the keys of the tokens to spoil
    are replaced by a number."""
    codec = empty(SPEC.replace("outliers=0.1", f"outliers={outliers}"), batch=4)[0].k
    prompts = sequences(4).window(np.zeros(4, np.int32), LENGTHS, 60)
    keys = np.array(prompts.k_pre)
    for token, number in spoil:
        keys[:, :, token] = number
    return keys, np.asarray(
        codec.statistics.of((), dataclasses.replace(prompts, k_pre=jnp.asarray(keys)))
    )


@pytest.mark.parametrize("outliers", [0.1, 0.0])
def test_statistics_are_those_of_a_calibration_on_the_prompt_alone(outliers: float):
    keys, found = statistics(outliers)
    for b, length in enumerate(LENGTHS[:2]):
        rows = np.moveaxis(keys[b, :, 1:length], 0, 1)
        options = {"levels": None, "per_channel": True, "per_matrix": False, "weighting": "none"}
        wanted = fit.parameters(
            rows, np.ones_like(rows), outliers=outliers, per_side=int(outliers > 0), **options
        )
        for i, name in enumerate(RANGES):
            np.testing.assert_allclose(
                found[b, :, i], wanted[name], rtol=1e-5, atol=1e-6, err_msg=f"{name} of row {b}"
            )
    assert np.abs(found[0] - found[1]).max() > 0.1, "every sequence has its own"
    assert (found[2:] == 0).all(), "no token after the first, no statistics"


def test_rows_that_are_not_finite_do_not_count():
    _, clean = statistics()
    _, found = statistics(spoil=((20, np.inf), (21, np.nan)))
    assert np.isfinite(found).all()
    assert 0 < np.abs(found[:2] - clean[:2]).max() < 2 * np.abs(clean).max(), "two rows fewer count"


def test_ranges_of_a_prompt_replace_those_of_the_calibration_and_stand_back_where_there_are_none():
    plan, params = empty(SPEC, batch=4)[0], parameters_of(empty(SPEC)[0])[0]
    calibrated = kvq.cache.layout(SPEC.replace("=prompt", "=calibrated"), DIMS, 1, 90).plans[0].k
    rows = jnp.asarray(sequences(4).k_pre[:, :, 5:37])
    stats = np.zeros((4, 2, 4, 32), np.float32)
    stats[0] = np.asarray([2.0, 0.5, -1.0, 2.0])[:, None]
    stats[0, :, :, 7] = np.asarray([0.0, 3.0, 3.0, 3.0])  # a channel that is constant in the prompt
    read = np.asarray(
        plan.k.dequantize(
            params, jnp.asarray(stats), plan.k.quantize(params, jnp.asarray(stats), rows, PROMPT)
        )
    )
    other = np.asarray(
        calibrated.dequantize(params, (), calibrated.quantize(params, (), rows, PROMPT))
    )
    np.testing.assert_array_equal(read[1:], other[1:], err_msg="rows without a prompt")
    levels = np.asarray(params["levels"]) * 2 + 0.5
    inside = (rows[0] > -1) & (rows[0] < 2)
    inside = np.asarray(inside.at[:, :, 7].set(False))
    nearest = levels[np.abs(np.asarray(rows)[0][..., None] - levels).argmin(axis=-1)]
    np.testing.assert_allclose(read[0][inside], nearest[inside], atol=1e-6)
    assert inside.sum() > 100
    assert (read[0] != other[0]).mean() > 0.5, "the calibration's ranges would pass"
    values = [np.sort(np.unique(np.round(array[0, 0, :, 7], 4))) for array in (read, other)]
    assert np.isin(values[0], values[1]).mean() > 0.5, (
        "a constant channel keeps the calibrated range"
    )


def test_keys_with_ranges_of_their_prompt_have_no_kernel_and_the_same_calibration():
    dims = CacheDims(1, 4, 2, 64, 256)
    online, other = (
        kvq.cache.layout(f"kvquant:outliers=0.04,channel_ranges={r}", dims, 1, 64).plans[0]
        for r in ("prompt", "calibrated")
    )
    assert "own ranges of channels" in str(online.k.kernels.reader())
    assert not isinstance(other.k.kernels.reader(), str)
    assert not isinstance(online.v.kernels.reader(), str), "values have ranges of tokens"
    assert jax.tree.leaves(online.v.statistics.spec(1, 2)) == []
    assert kvq.cache.has_prompt_statistics("kvquant:channel_ranges=prompt", dims)
    assert not kvq.cache.has_prompt_statistics("kvquant", dims)
    assert online.k.learning.key == other.k.learning.key, "one calibration serves both"
