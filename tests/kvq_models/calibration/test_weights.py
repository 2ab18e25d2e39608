"""Weights of a few bits: many rows are fitted like one, sensitivities are squared gradients, and
few values are left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.methods.kvquant.kmeans import nearest, weighted_levels, weighted_levels_of_rows
from kvq_models.calibration import samples, weights
from kvq_models.llama import hf_names
from kvq_models.llama.model import forward
from tests.kvq_models.checkpoints import random_llama, tiny_config

TOKENS = np.random.default_rng(0).integers(0, 64, 200)


@pytest.fixture(scope="module")
def llama():
    return random_llama(tiny_config(vocab_size=64, num_hidden_layers=2, max_position_embeddings=64))


def distortion(y: np.ndarray, weight: np.ndarray, levels: np.ndarray) -> float:
    return float((weight * np.square(y - levels[nearest(y, levels)])).sum())


def test_a_mixture_of_experts_is_refused():
    config = tiny_config("mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=r"\A[^\n]* mixture of experts has no MLP to quantize"):
        weights.check_request(config, TOKENS, 4, 0.0, 1, 16)


@pytest.mark.parametrize(("numbers", "entries"), [(40, 16), (300, 4)])
def test_levels_of_rows_are_as_good_as_those_of_one_row(numbers: int, entries: int):
    rng = np.random.default_rng(1)
    y, weight = (
        rng.standard_t(4, size=(6, numbers)) * np.geomspace(1e-3, 10, 6)[:, None],
        rng.gamma(0.5, size=(6, numbers)) + 1e-6,
    )
    for row, own, levels in zip(
        y, weight, weighted_levels_of_rows(y, weight, entries), strict=True
    ):
        size = np.abs(row).max()
        one = distortion(row, own, size * weighted_levels(row / size, own, entries))
        assert distortion(row, own, levels) <= 1.05 * one + 1e-12
        assert (
            distortion(row, own, np.quantile(row, (np.arange(entries) + 0.5) / entries)) > 1.1 * one
        ), "quantiles would pass"


def test_sensitivities_are_the_squared_gradients_of_the_loss(llama):
    window = samples.draw(TOKENS, 1, 16, 0, None)[0]

    def loss(changed):
        logits = jax.nn.log_softmax(forward(changed, jnp.asarray(window[None, :-1], jnp.int32))[0])
        return -jnp.take_along_axis(logits, jnp.asarray(window[1:, None]), axis=-1).sum()

    gradients = {
        path: weight.leaf for path, weight in hf_names.weights(jax.grad(loss)(llama)).items()
    }
    seen, quantized_rows = {}, weights.quantized_rows

    def spy(kernel, sensitivity, bits, sparse):
        seen[kernel.tobytes()] = sensitivity
        return quantized_rows(kernel, sensitivity, bits, sparse)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "quantized_rows", spy)
        weights.quantize_weights(llama, TOKENS, bits=4, samples=1, length=16)
    for path in (
        "layers.0.q_proj.kernel",
        "layers.0.mlp.down_proj.kernel",
        "layers.1.o_proj.kernel",
    ):
        kernel = np.asarray(hf_names.weights(llama)[path].leaf, np.float32).T
        wanted = np.square(np.asarray(gradients[path]).T)
        np.testing.assert_allclose(
            seen[kernel.tobytes()], wanted, rtol=2e-3, atol=1e-5 * wanted.max(), err_msg=path
        )


@pytest.mark.parametrize(("bits", "sparse"), [(3, 0.0), (2, 0.02)])
def test_each_output_channel_has_few_values_and_the_rest_of_the_model_stays(
    llama, bits: int, sparse: float
):
    quantized, count = weights.quantize_weights(
        llama, TOKENS, bits=bits, sparse=sparse, samples=2, length=16
    )
    before, after = hf_names.weights(llama), hf_names.weights(quantized)
    stayed = 0
    for path, weight in before.items():
        old, new = np.asarray(weight.leaf), np.asarray(after[path].leaf)
        if path.partition(".")[2].partition(".")[2] not in weights.PROJECTIONS:
            np.testing.assert_array_equal(old, new, err_msg=path)
            continue
        same = old == new
        stayed += int(same.sum())
        for channel in range(old.shape[1]):
            assert len(np.unique(new[~same[:, channel], channel])) <= 2**bits, (
                f"{path}, channel {channel}"
            )
        assert 0 < np.square(new - old).mean() < 0.2 * np.square(old).mean(), path
    assert stayed >= sparse * count.weights
    assert count.bits > bits + 32 * sparse
    assert 0 < count.weighted_error < 0.2
