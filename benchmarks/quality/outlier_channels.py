"""Count how often the key projection's weights alone name the channel of key outliers: Table B.2 of the XQuant paper, one or more texts.

    accuracy(k)   share of the layers whose channel of keys with the largest mean magnitude is among the k largest of |B^T[0]|,
                  W_k = U S B^T
    first         share of the layers whose largest latent channel of X U is the first one

`kvq doctor MODEL --outliers --text FILE` shows the same for one text, layer by layer. Keys are before RoPE, with their bias and QK-norm.
Accuracies are of layers, so there is no interval: each number is a count of the model's own layers.

    python -m benchmarks.quality.outlier_channels --texts wikitext2_test.txt tinyshakespeare.txt --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks.markdown import head, table
from benchmarks.quality.study import first_tokens, model_words, run_study, shown, study_parser
from benchmarks.report_file import Report, header
from kvq_models import Llama, load_llama
from kvq_tools.evaluation import outlier_channels
from kvq_tools.evaluation.outlier_channels import TOPS

ROW = 512  # tokens of a piece of text; every piece is a sequence of its own


@dataclasses.dataclass(frozen=True)
class TextChannels:
    """One text: the channel of keys with the largest mean magnitude, and its place among the predictions (None: not among them), for each
    layer; and whether the first latent channel of keys and of values is the largest."""

    text: str
    channels: tuple[int, ...]
    places: tuple[int | None, ...]
    first_latent_k: tuple[bool, ...]
    first_latent_v: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutlierChannelsReport(Report):
    """What was measured on each text."""

    model: str
    tokens: int
    texts: tuple[TextChannels, ...]


def channels_of(llama: Llama, rows: np.ndarray, text: str) -> TextChannels:
    """Return the outlier channels of one text. rows: token ids [rows, T]. Exact forward passes."""
    parts = [[outlier_channels.decompose(np.asarray(p.kernel[...])) for p in (layer.k_proj, layer.v_proj)] for layer in llama.layers]
    channels, places, first = [], [], []
    for (keys, _), magnitudes in zip(
        parts, outlier_channels.layer_magnitudes(llama, rows, iter([(k.u, v.u) for k, v in parts])), strict=True
    ):
        channels.append(outlier_channels.peak(magnitudes.keys).channel)
        places.append(outlier_channels.place(outlier_channels.predicted_channels(keys), channels[-1]))
        first.append([outlier_channels.peak(latent).channel == 0 for latent in (magnitudes.latent_k, magnitudes.latent_v)])
    return TextChannels(text, tuple(channels), tuple(places), tuple(k for k, _ in first), tuple(v for _, v in first))


def run(options: argparse.Namespace) -> OutlierChannelsReport:
    """Measure every text. ValueError where one is too short."""
    llama, tokenizer = load_llama(options.model, dtype="float32")
    texts = []
    for path in options.texts:
        length = min(ROW, options.tokens)
        rows = first_tokens(tokenizer, path, options.tokens)[: options.tokens // length * length].reshape(-1, length)
        texts.append(channels_of(llama, rows, path.name))
    return OutlierChannelsReport(
        title=f"Outlier channels of keys from weights alone, {shown(options.model)}",
        **header(_command(options)),
        model=f"{shown(options.model)}, float32",
        tokens=options.tokens,
        texts=tuple(texts),
    )


def _command(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line, files by their names."""
    texts = " ".join(path.name for path in options.texts)
    words = [f"--texts {texts}", f"--tokens {options.tokens}", f"--json {options.json.name}"]
    return ["benchmarks.quality.outlier_channels", *model_words(options.model), *words]


def page(report: OutlierChannelsReport, file: pathlib.Path) -> str:
    """Render Table B.2, whether texts agree on the channels, and how often the first latent channel is the largest."""
    said = (
        f"Model: {report.model}, the first {report.tokens} tokens of each text in pieces of {ROW}. A prediction is right where the channel "
        "of keys with the largest mean magnitude is among the k largest entries of the first right singular vector of W_k."
    )
    lines = [(f"k={k}", *(f"{100 * outlier_channels.accuracies(text.places)[k]:.1f} %" for text in report.texts)) for k in TOPS]
    parts = [*head(report, file, said), table(("XQuant, Table B.2: layers predicted right", *(text.text for text in report.texts)), lines)]
    for side, name in (("k", "keys"), ("v", "values")):
        shares = (f"{100 * np.mean(getattr(text, f'first_latent_{side}')):.1f} %" for text in report.texts)
        parts.append(
            table((f"The first latent channel of {name} is the largest", *(text.text for text in report.texts)), [("layers", *shares)])
        )
    if len(report.texts) > 1:
        same = np.mean([len(set(channels)) == 1 for channels in zip(*(text.channels for text in report.texts), strict=True)])
        parts.append(f"All texts have the same channel in {100 * same:.1f} % of the layers.")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("benchmarks.quality.outlier_channels", __doc__)
    parser.add_argument("--texts", metavar="FILE", type=pathlib.Path, nargs="+", required=True, help="the texts that the model reads")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each")
    run_study(parser, argv, run)


if __name__ == "__main__":
    main()
