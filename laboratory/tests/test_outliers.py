"""Outlier channels of keys: the arithmetic of XQuant's Appendix B, and the study on models built to
agree or not."""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models import EMBEDDED, save_llama
from kvq_models.calibration.activations import record
from laboratory import outlier_channels
from laboratory.embedded_model.tokenizer import save_tokenizer, train_tokenizer
from laboratory.outlier_channels import Decomposition
from laboratory.studies import outliers
from tests.kvq_models.checkpoints import random_llama, random_tokens, tiny_config

WIDTH, KEYS = 64, 32  # of the built models: hidden size, and channels of all KV heads
PREDICTED, OTHER = (
    21,
    6,
)  # where the first singular direction of W_k goes, and where the second does
TEXT = (
    "the key of the cat is seven, and the key of the dog is eight, and nobody knows the key of the"
    " bird. " * 6
)


def directions(width: int, count: int) -> np.ndarray:
    """Orthonormal rows [count, width]."""
    return np.linalg.qr(np.random.default_rng(5).standard_normal((width, count)))[0].T.astype(
        np.float32
    )


def key_rows() -> np.ndarray:
    """Two orthonormal rows of B^T: the first is largest at PREDICTED, nowhere zero but at OTHER;
    the second is OTHER alone."""
    first = np.linspace(0.05, 0.15, KEYS, dtype=np.float32)
    first[PREDICTED], first[OTHER] = 0.9, 0
    return np.stack([first / np.linalg.norm(first), np.eye(KEYS, dtype=np.float32)[OTHER]])


def built_model(*, aligned: bool, model_type: str = "llama", **fields):
    """Every layer's W_k is 4 u_0 b_0 + 2 u_1 b_1, and all its inputs lie close to u_0 (aligned) or
    to u_1."""
    llama = random_llama(
        tiny_config(
            model_type,
            vocab_size=300,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            **fields,
        )
    )
    u, b = directions(WIDTH, 2), key_rows()
    common = u[0] if aligned else u[1]
    noise = np.random.default_rng(6).standard_normal((300, WIDTH)).astype(np.float32)
    llama.embed[...] = jnp.asarray(3 * common + 0.02 * noise)
    for layer in llama.layers:
        layer.input_norm.scale[...] = jnp.ones(WIDTH)
        layer.k_proj.kernel[...] = jnp.asarray(4 * np.outer(u[0], b[0]) + 2 * np.outer(u[1], b[1]))
        for kernel in (layer.o_proj.kernel, layer.mlp.down_proj.kernel):
            kernel[...] = 1e-3 * kernel[...]  # so that the next layer sees the same direction
    return llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(llama) -> a checkpoint directory with a tokenizer."""

    def save(llama):
        directory = tmp_path_factory.mktemp("model")
        save_llama(llama, directory)
        save_tokenizer(train_tokenizer([TEXT], 300), directory, 256)
        return directory

    return save


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


# --- arithmetic


@pytest.mark.parametrize("shape", [(64, 32), (32, 32), (32, 64)])
def test_a_decomposition_gives_the_projection_back_from_orthonormal_factors(shape):
    kernel = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    parts = outlier_channels.decompose(kernel)
    rank = min(shape)
    np.testing.assert_allclose(parts.u * parts.singular @ parts.bt, kernel, atol=2e-5)
    np.testing.assert_allclose(parts.u.T @ parts.u, np.eye(rank), atol=2e-5, err_msg="U")
    np.testing.assert_allclose(parts.bt @ parts.bt.T, np.eye(rank), atol=2e-5, err_msg="B")
    assert np.all(np.diff(parts.singular) <= 0)
    np.testing.assert_allclose(outlier_channels.singular_values(kernel), parts.singular, rtol=1e-5)


def test_predictions_are_the_largest_entries_of_the_first_row_of_b_whatever_their_signs():
    bt = np.array([[0.1, -0.9, 0.2, 0.35, 0.0], [0.9, 0.1, 0.0, 0.0, 0.3]], np.float32)
    parts = Decomposition(np.eye(2, dtype=np.float32), np.array([3.0, 1.0], np.float32), bt)
    assert outlier_channels.predicted_channels(parts, 3).tolist() == [1, 3, 2]
    assert outlier_channels.predicted_channels(parts._replace(bt=-bt), 3).tolist() == [1, 3, 2]
    assert outlier_channels.predicted_channels(parts._replace(bt=bt[::-1]), 1).tolist() == [0], (
        "another row predicts another channel"
    )
    assert outlier_channels.first_share(parts.singular) == (0.75, 0.9)
    assert outlier_channels.first_share(np.zeros(4, np.float32)) == (0.0, 0.0)


def test_peaks_places_and_accuracies_by_hand():
    assert outlier_channels.peak(np.array([1.0, 8.0, 2.0], np.float32)) == (4.0, 1)
    assert outlier_channels.peak(np.array([0.0, 0.0, 2.0], np.float32)) == (float("inf"), 2)
    assert outlier_channels.peak(np.zeros(3, np.float32)) == (1.0, 0)
    places = [outlier_channels.place([4, 9, 2], channel) for channel in (4, 2, 7)]
    assert places == [1, 3, None]
    assert outlier_channels.accuracies([*places, 8]) == {1: 0.25, 2: 0.25, 4: 0.5, 8: 0.75}


def test_magnitudes_are_means_over_all_tokens_of_what_the_model_computes():
    llama = random_llama(tiny_config("qwen2"), seed=3)
    rows = np.asarray(random_tokens((3, 24)))
    parts = [
        [
            outlier_channels.decompose(np.asarray(p.kernel[...]))
            for p in (layer.k_proj, layer.v_proj)
        ]
        for layer in llama.layers
    ]
    found = list(
        outlier_channels.layer_magnitudes(llama, rows, iter([(k.u, v.u) for k, v in parts]))
    )
    keys: dict[int, list[np.ndarray]] = {0: [], 1: []}
    for row in rows:
        window = np.append(row, 0)  # the last token is only a label there
        record(
            llama,
            window,
            lambda r: (
                keys[r.layer].append(r.array.reshape(24, -1))
                if (r.side, r.what) == ("k", "rows")
                else None
            ),
        )
    for layer, magnitudes in enumerate(found):
        recorded = np.concatenate(keys[layer])
        np.testing.assert_allclose(
            magnitudes.keys, np.abs(recorded).mean(0), rtol=1e-4, err_msg=f"keys of layer {layer}"
        )
        bias = np.asarray(llama.layers[layer].k_proj.bias[...])
        projected = recorded - bias  # X W_k = K - b, and X U = X W_k B / S
        np.testing.assert_allclose(
            magnitudes.projected,
            np.abs(projected).mean(0),
            rtol=1e-3,
            atol=1e-5,
            err_msg=f"X W_k of layer {layer}",
        )
        k = parts[layer][0]
        latent = np.abs(projected @ k.bt.T / k.singular).mean(0)
        np.testing.assert_allclose(
            magnitudes.latent_k, latent, rtol=1e-3, atol=1e-4, err_msg=f"X U_k of layer {layer}"
        )
        assert not np.allclose(magnitudes.latent_v, latent, rtol=0.05), "X U_v is not X U_k"
        assert not np.allclose(magnitudes.keys, np.abs(recorded[:24]).mean(0), rtol=1e-3), (
            "one row of three has another mean"
        )


def test_keys_that_are_not_finite_are_refused_by_layer():
    llama = random_llama(tiny_config(), seed=3)
    llama.layers[1].k_proj.kernel[...] = jnp.full((WIDTH, KEYS), jnp.inf)
    bases = iter(2 * [(np.zeros((WIDTH, KEYS), np.float32), np.zeros((WIDTH, KEYS), np.float32))])
    with pytest.raises(ValueError, match="layer 1: keys or values are not finite"):
        list(outlier_channels.layer_magnitudes(llama, np.asarray(random_tokens((1, 24))), bases))


# --- the study


def study(directory, *words) -> dict:
    """Return the result of the study on a model."""
    options = argparse.ArgumentParser()
    outliers.add_arguments(options)
    parsed = options.parse_args(["--dtype", "float32", *map(str, words)])
    return outliers.run(argparse.Namespace(model=str(directory), **vars(parsed)))


def test_a_model_whose_inputs_lie_along_the_first_direction_is_predicted(saved, text):
    found = study(saved(built_model(aligned=True)), "--text", text)
    for layer in found["layers"]:
        outcome = layer["measured"]
        first = layer["k"]["predicted"][0]
        assert (first["head"], first["channel"], first["weight"]) == (
            1,
            5,
            pytest.approx(key_rows()[0, PREDICTED], rel=1e-4),
        )
        assert outcome["latent_k"]["is_first"]
        assert outcome["latent_k"]["ratio"] is None or outcome["latent_k"]["ratio"] > 10, (
            "the other latent channels hold noise"
        )
        largest = outcome["largest_key"]
        assert (largest["head"], largest["channel"], largest["place"]) == (1, 5, 1)
        assert layer["k"]["share"] == pytest.approx(4 / 6, rel=1e-3), "singular values 4 and 2"
    assert set(found["accuracy"]["keys"].values()) == {1.0}
    assert found["accuracy"]["first_latent_k"] == 1


def test_a_model_whose_inputs_lie_along_the_second_direction_is_reported_as_a_miss(saved, text):
    found = study(saved(built_model(aligned=False)), "--text", text)
    for layer in found["layers"]:
        outcome = layer["measured"]
        assert (outcome["latent_k"]["is_first"], outcome["latent_k"]["channel"]) == (False, 1)
        largest = outcome["largest_key"]
        assert (largest["head"], largest["channel"], largest["place"]) == (0, OTHER, None)
    assert set(found["accuracy"]["keys"].values()) == {0.0}


def test_a_bias_that_decides_is_told_apart_from_the_projection(saved, text):
    llama = built_model(aligned=True, model_type="qwen2")
    for layer in llama.layers:
        layer.k_proj.bias[...] = 1000 * jax.nn.one_hot(OTHER, KEYS)
    found = study(saved(llama), "--text", text)
    assert set(found["accuracy"]["projected"].values()) == {1.0}
    assert set(found["accuracy"]["keys"].values()) == {0.0}
    assert ["bias" in note for note in found["notes"]].count(True) == 1


def test_qk_norm_that_decides_is_told_apart_from_the_projection(saved, text):
    llama = built_model(aligned=True, model_type="qwen3")
    for layer in llama.layers:
        layer.k_norm.scale[...] = jnp.ones(16).at[OTHER].set(100.0).at[PREDICTED % 16].set(0.01)
        # so that no channel is zero before its gain
        layer.k_proj.kernel[...] = layer.k_proj.kernel[...] + 0.05
    found = study(saved(llama), "--text", text)
    assert found["accuracy"]["projected"]["1"] == 1
    assert found["accuracy"]["keys"]["1"] == 0
    largest = [layer["measured"]["largest_key"]["channel"] for layer in found["layers"]]
    assert largest == [OTHER, OTHER]
    assert ["QK-norm" in note for note in found["notes"]].count(True) == 1


def test_predictions_for_the_embedded_model_are_the_same_with_and_without_a_text(text):
    alone, checked = study(EMBEDDED), study(EMBEDDED, "--text", text)
    assert (alone["accuracy"], alone["tokens"]) == (None, 0)
    assert checked["tokens"] > 100
    assert [layer["layer"] for layer in alone["layers"]] == [0, 1, 2, 3]
    for one, other in zip(alone["layers"], checked["layers"], strict=True):
        assert (one["measured"], one["k"]["predicted"]) == (None, other["k"]["predicted"])
        assert len(one["k"]["predicted"]) == 8
        assert one["v"]["share"] == pytest.approx(other["v"]["share"])
        outcome = other["measured"]
        assert outcome["largest_key"] == outcome["largest_projected"], (
            "without bias and QK-norm both truths are one"
        )
        assert outcome["latent_v"]["ratio"] > 1
    accuracy = checked["accuracy"]["keys"]
    assert list(accuracy) == ["1", "2", "4", "8"]
    assert sorted(accuracy.values()) == list(accuracy.values()), "more predictions never find fewer"
