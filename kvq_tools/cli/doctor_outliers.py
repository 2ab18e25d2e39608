"""`kvq doctor MODEL --outliers`: predict the outlier channels of the keys from the weights alone,
and check them on a text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvq_models.llama import checkpoint
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs
from kvq_tools.cli.console import UserError, bar, input_errors, print_json, progress, warn
from kvq_tools.cli.tables import print_line, print_table
from kvq_tools.evaluation import outlier_channels
from kvq_tools.evaluation.outlier_channels import TOPS, Decomposition, Magnitudes, Peak
from kvq_tools.evaluation.results import finite

TOKENS, ROW = 4096, 1024  # of the text, and of each sequence that it is cut into
FEW = 64  # tokens that are too few for means
WEIGHT_NAME = "model.layers.{}.self_attn.{}_proj.weight"
PAPER = (
    "Table B.2 of the XQuant paper, WikiText-2: Llama-3.1-8B 66, 72, 88, 100 %; Mistral-7B 75, 88,"
    " 94, 97 %"
)

HELP = f"""\
With --outliers it looks at the model alone, as Appendix B of the XQuant paper does: the singular value decomposition of each
layer's key projection, W_k = U S B^T, predicts the channels in which keys have outliers before RoPE: those with the largest
entries in the first row of B^T. With --text, the model reads up to {TOKENS} tokens of a text, and predictions are compared with
the channel that is the largest there. This reads weights (of a Hub id: downloads them)."""


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model)
    windows = None if options.text is None else read_windows(options, config)
    layers, notes = (
        weights_alone(options.model, config) if windows is None else on_a_text(options, windows)
    )
    result = {
        "model": options.model,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "k_proj_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "text": options.text,
        "tokens": 0 if windows is None else int(windows.size),
        "layers": layers,
        "accuracy": None if windows is None else accuracy(layers),
        "notes": notes + differences(config),
    }
    print_json("doctor-outliers", result) if options.json else _print(result)


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


# --- from the weights
# ---------------------------------------------------------------------------------------------------------------------


def weights_alone(model: str, config: LlamaConfig) -> tuple[list[dict[str, Any]], list[str]]:
    """Return every layer's predictions and the notes to them, reading two projections of a layer at
    a time."""
    with input_errors():
        files = checkpoint.open_checkpoint(model)
        stored = files.tensors
        width = config.num_key_value_heads * config.head_dim
        for name in (
            WEIGHT_NAME.format(layer, side)
            for layer in range(config.num_hidden_layers)
            for side in "kv"
        ):
            shape = stored[name].shape if name in stored else None
            if shape != (width, config.hidden_size):
                raise ValueError(
                    f"tensor {name!r} has shape {shape} in the files, and config.json asks for"
                    f" {(width, config.hidden_size)}"
                )
    layers = []
    for layer in bar(
        range(config.num_hidden_layers), "decomposing key and value projections, layers"
    ):
        with input_errors():
            keys, values = (
                files.read(WEIGHT_NAME.format(layer, side)).astype(np.float32).T for side in "kv"
            )
            parts, singular = (
                outlier_channels.decompose(keys),
                outlier_channels.singular_values(values),
            )
        layers.append(predictions(layer, parts, singular, config.head_dim) | {"measured": None})
    return layers, ["predictions were not checked: give --text FILE"]


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


# --- on a text
# ----------------------------------------------------------------------------------------------------------------------------


def read_windows(options: argparse.Namespace, config: LlamaConfig) -> np.ndarray:
    """Return token ids [rows, T], consecutive pieces of the text, before any weight is read."""
    tokenizer = inputs.need_tokenizer(options.model, "read the text")
    beginning = inputs.read_text(options.text)[
        : 16 * TOKENS
    ]  # a book would take long to encode; tokens are shorter than that
    if not beginning.strip():
        raise UserError(f"{options.text!r} holds no text")
    ids = inputs.encode(tokenizer, beginning)[:TOKENS]
    inputs.check_tokens(ids, config)
    length = min(ROW, config.positions, len(ids))
    if len(ids) < FEW:
        warn(f"{Path(options.text).name} has {len(ids)} tokens only; means over so few say little")
    return np.array(ids[: len(ids) // length * length]).reshape(-1, length)


def on_a_text(
    options: argparse.Namespace, windows: np.ndarray
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return every layer's predictions beside what the model's forward pass over the text shows,
    and notes."""
    with progress(f"loading {options.model}"), input_errors():
        llama, _ = load_llama(options.model, dtype=options.dtype)
    head_dim, said, layers = llama.config.head_dim, [], []

    def bases() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for index in bar(
            range(llama.config.num_hidden_layers),
            f"decomposing projections and reading {windows.size} tokens, layers",
        ):
            layer = llama.layers[index]
            keys, values = (
                outlier_channels.decompose(np.asarray(p.kernel[...]))
                for p in (layer.k_proj, layer.v_proj)
            )
            said.append(predictions(index, keys, values.singular, head_dim))
            yield keys.u, values.u

    with input_errors():
        for magnitudes in outlier_channels.layer_magnitudes(llama, windows, bases()):
            layers.append(
                said[-1] | {"measured": measured(magnitudes, said[-1]["k"]["predicted"], head_dim)}
            )
    return layers, [f"{windows.shape[0]} pieces of {windows.shape[1]} tokens, {options.dtype}"]


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


# --- text
# ---------------------------------------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any]) -> None:
    if result["accuracy"] is None:
        _print_predictions(result)
    else:
        _print_measured(result)
    for note in result["notes"]:
        print_line(note)


def _print_predictions(result: dict[str, Any]) -> None:
    columns = (
        "layer",
        "predicted, KV head:channel",
        "first of W_k",
        "squared",
        "first of W_v",
        "squared",
    )
    rows = [
        (
            layer["layer"],
            " ".join(_named(entry) for entry in layer["k"]["predicted"]),
            *_shares(layer["k"]),
            *_shares(layer["v"]),
        )
        for layer in result["layers"]
    ]
    print_table(
        f"{result['model']}: channels predicted to hold outliers in the keys before RoPE",
        columns,
        rows,
        numeric=columns[2:],
    )
    print_line(
        "first of W: the share of the largest singular value in the sum of all; squared: in the sum"
        " of their squares"
    )


def _print_measured(result: dict[str, Any]) -> None:
    apart = result["k_proj_bias"] or result["qk_norm"]
    columns = [
        "layer",
        "predicted, KV head:channel",
        "first of W_k",
        "X U_k",
        "largest key channel",
        "predicted as",
    ]
    columns += ["largest of X W_k", "predicted as"] if apart else []
    columns += ["first of W_v", "X U_v"]
    rows = []
    for layer in result["layers"]:
        peaks = layer["measured"]
        row = [
            layer["layer"],
            " ".join(_named(entry) for entry in layer["k"]["predicted"]),
            _shares(layer["k"])[0],
        ]
        row += [_latent_text(peaks["latent_k"]), *_truth(peaks["largest_key"])]
        row += _truth(peaks["largest_projected"]) if apart else []
        rows.append([*row, _shares(layer["v"])[0], _latent_text(peaks["latent_v"])])
    print_table(
        f"{result['model']}, {result['tokens']} tokens of {Path(result['text']).name}",
        columns,
        rows,
    )
    print_line(
        "first of W: the share of the largest singular value in the sum of all; X U: the largest"
        " latent channel, relative to the median"
    )
    _print_accuracy(result, apart)


def _print_accuracy(result: dict[str, Any], apart: bool) -> None:
    accuracies, layers, width = (
        result["accuracy"],
        len(result["layers"]),
        result["kv_heads"] * result["head_dim"],
    )
    rows = [
        (
            "keys before RoPE" + (", as cached" if apart else ""),
            *_percents(accuracies["keys"].values()),
        )
    ]
    rows += [("X W_k alone", *_percents(accuracies["projected"].values()))] if apart else []
    rows.append((f"by chance, {width} channels", *_percents(min(1, k / width) for k in TOPS)))
    columns = ("largest channel of", *(f"among {k}" if k > 1 else "the first" for k in TOPS))
    print_table(
        f"largest channel among the first predictions, share of {layers} layers",
        columns,
        rows,
        numeric=columns[1:],
    )
    print_line(PAPER)
    shares = "; ".join(f"X U_{side} {accuracies[f'first_latent_{side}']:.0%}" for side in "kv")
    print_line(
        f"layers whose largest latent channel is the first: {shares} (the paper: X U_k in all"
        " layers, and no such pattern in X U_v)"
    )


def _named(entry: dict[str, Any]) -> str:
    return f"{entry['head']}:{entry['channel']}"


def _shares(spectrum: dict[str, Any]) -> tuple[str, str]:
    return f"{spectrum['share']:.1%}", f"{spectrum['energy_share']:.1%}"


def _latent_text(peak: dict[str, Any]) -> str:
    where = "the first" if peak["is_first"] else f"number {peak['channel'] + 1}"
    return f"{where}, {_times(peak['ratio'])}"


def _truth(peak: dict[str, Any]) -> tuple[str, str]:
    return f"{_named(peak)}, {_times(peak['ratio'])}", (
        "missed" if peak["place"] is None else f"number {peak['place']}"
    )


def _times(ratio: float | None) -> str:
    return "median 0" if ratio is None else f"{ratio:.1f}x"


def _percents(shares: Any) -> list[str]:
    return [f"{share:.0%}" for share in shares]
