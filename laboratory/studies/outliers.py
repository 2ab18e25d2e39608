"""Predict the outlier channels of keys from the weights alone, and check them on a text: Appendix B
of the XQuant paper.

The singular value decomposition of each layer's key projection, W_k = U S B^T, predicts the
channels in which keys have outliers before RoPE: those with the largest entries in the first row of
B^T. With --text, the model reads up to 4096 tokens, and predictions are compared with the channel
that is the largest there. The paper's Table B.2 on WikiText-2, 1, 2, 4 and 8 entries: Llama-3.1-8B
66, 72, 88, 100 %; Mistral-7B 75, 88, 94, 97 %.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvq_models.llama import checkpoint
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.evaluation.results import finite
from laboratory import outlier_channels
from laboratory.outlier_channels import Decomposition, Magnitudes, Peak

TOKENS, ROW = 4096, 1024  # of the text, and of each sequence that it is cut into
WEIGHT_NAME = "model.layers.{}.self_attn.{}_proj.weight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", metavar="FILE", type=pathlib.Path, help="a text on which to check predictions")
    add("--dtype", default="bfloat16", help="dtype of weights and activations, with --text")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return predictions by layer; with a text also what was measured, and their accuracy."""
    config = checkpoint.open_checkpoint(options.model).config
    if options.text is None:
        layers, tokens, rates = weights_alone(options.model, config), 0, None
    else:
        llama, tokenizer = load_llama(options.model, dtype=options.dtype, weights="dense")
        windows = windows_of(tokenizer, options.text, config)
        layers, tokens = on_a_text(llama, windows), int(windows.size)
        rates = accuracy(layers)
    return {
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "tokens": tokens,
        "layers": layers,
        "accuracy": rates,
        "notes": differences(config),
    }


def differences(config: LlamaConfig) -> list[str]:
    """Return the reasons why this model's keys are not X W_k."""
    notes = []
    if config.qkv_bias:
        notes.append(
            "k_proj has a bias, which the prediction does not see: keys are X W_k + b, and a"
            " channel where b is large may be the largest"
        )
    if config.qk_norm:
        notes.append(
            "QK-norm divides each head's key by its own size and applies a gain to each channel,"
            " which the prediction does not see: heads whose X W_k is larger are not larger in the"
            " keys"
        )
    return notes


def weights_alone(model: str, config: LlamaConfig) -> list[dict[str, Any]]:
    """Return every layer's predictions, reading two projections of a layer at a time."""
    files, layers = checkpoint.open_checkpoint(model), []
    for layer in range(config.num_hidden_layers):
        keys, values = (
            files.read(WEIGHT_NAME.format(layer, side)).astype(np.float32).T for side in "kv"
        )
        parts = outlier_channels.decompose(keys)
        singular = outlier_channels.singular_values(values)
        layers.append(predictions(layer, parts, singular, config.head_dim) | {"measured": None})
    return layers


def predictions(
    layer: int, parts: Decomposition, value_spectrum: np.ndarray, head_dim: int
) -> dict[str, Any]:
    channels = outlier_channels.predicted_channels(parts)
    return {
        "layer": layer,
        "k": {
            "predicted": [
                _channel(int(c), head_dim) | {"weight": float(abs(parts.bt[0, c]))}
                for c in channels
            ],
            **_spectrum(parts.singular),
        },
        "v": _spectrum(value_spectrum),
    }


def _spectrum(singular: np.ndarray) -> dict[str, float]:
    share, energy = outlier_channels.first_share(singular)
    return {"first_singular_value": float(singular[0]), "share": share, "energy_share": energy}


def _channel(index: int, head_dim: int) -> dict[str, int]:
    return {"head": index // head_dim, "channel": index % head_dim}


def windows_of(tokenizer: Any, text: pathlib.Path, config: LlamaConfig) -> np.ndarray:
    """Return token ids [rows, T] of consecutive pieces of the text."""
    beginning = text.read_text(encoding="utf-8")[: 16 * TOKENS]  # tokens are shorter than that
    if not beginning.strip():
        raise ValueError(f"{text.name} holds no text")
    ids = np.asarray(tokenizer(beginning, verbose=False).input_ids[:TOKENS], np.int32)
    length = min(ROW, config.positions, len(ids))
    return ids[: len(ids) // length * length].reshape(-1, length)


def on_a_text(llama: Llama, windows: np.ndarray) -> list[dict[str, Any]]:
    """Return every layer's predictions beside what the forward pass over the text shows."""
    head_dim, predicted, layers = llama.config.head_dim, [], []

    def bases() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for index, layer in enumerate(llama.layers):
            keys, values = (
                outlier_channels.decompose(np.asarray(p.kernel[...]))
                for p in (layer.k_proj, layer.v_proj)
            )
            predicted.append(predictions(index, keys, values.singular, head_dim))
            yield keys.u, values.u

    for magnitudes in outlier_channels.layer_magnitudes(llama, windows, bases()):
        last = predicted[-1]
        layers.append(last | {"measured": measured(magnitudes, last["k"]["predicted"], head_dim)})
    return layers


def measured(
    magnitudes: Magnitudes, predicted: list[dict[str, Any]], head_dim: int
) -> dict[str, Any]:
    """Return, for one layer, the outlier among the latent channels, the largest channel of the
    keys, and the place of its prediction."""
    flat = [entry["head"] * head_dim + entry["channel"] for entry in predicted]

    def truth(peak: Peak) -> dict[str, Any]:
        return _channel(peak.channel, head_dim) | {
            "ratio": finite(peak.ratio),
            "place": outlier_channels.place(flat, peak.channel),
        }

    return {
        "latent_k": _latent(outlier_channels.peak(magnitudes.latent_k)),
        "latent_v": _latent(outlier_channels.peak(magnitudes.latent_v)),
        "largest_projected": truth(outlier_channels.peak(magnitudes.projected)),
        "largest_key": truth(outlier_channels.peak(magnitudes.keys)),
    }


def _latent(peak: Peak) -> dict[str, Any]:
    return {"ratio": finite(peak.ratio), "channel": peak.channel, "is_first": peak.channel == 0}


def accuracy(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Table B.2 for this model and text, for keys and for X W_k alone, and the share of
    layers whose first latent channel is largest."""

    def of(truth: str) -> dict[str, float]:
        return {
            str(k): share
            for k, share in outlier_channels.accuracies(
                [layer["measured"][truth]["place"] for layer in layers]
            ).items()
        }

    first = {
        side: sum(layer["measured"][f"latent_{side}"]["is_first"] for layer in layers) / len(layers)
        for side in "kv"
    }
    return {
        "keys": of("largest_key"),
        "projected": of("largest_projected"),
        "first_latent_k": first["k"],
        "first_latent_v": first["v"],
    }
