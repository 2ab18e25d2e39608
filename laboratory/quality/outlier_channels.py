"""Count how often the key projection's weights alone name the channel of key outliers: Table B.2 of
the XQuant paper, one or more texts.

    accuracy(k)   share of the layers whose channel of keys with the largest mean magnitude is among
                  the k largest of |B^T[0]|, W_k = U S B^T
    first         share of the layers whose largest latent channel of X U is the first one

`python -m laboratory.run outliers --text FILE` has the same of one text by layers. Keys are before
RoPE, with their bias and QK-norm. Means are over all tokens of a text, which is read in
windows. The same shares within one window, with the largest channels of that window, have t
intervals over the windows. The layers are all that the model has.

    python -m laboratory.quality.outlier_channels --texts wikitext2_test.txt tinyshakespeare.txt
    --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from benchmarks.markdown import head, table, with_interval
from benchmarks.model_names import model_words, shown
from benchmarks.progress import progress
from benchmarks.report_file import Report, header
from kvq_models import Llama, load_llama
from kvq_tools.evaluation.intervals import Estimate, mean_interval
from laboratory import outlier_channels
from laboratory.outlier_channels import TOPS
from laboratory.study import first_tokens, run_study, study_parser

WINDOW = 512  # tokens; every window is a sequence of its own
DIGITS = 6  # of a stored magnitude


@dataclasses.dataclass(frozen=True)
class Rivals:
    """The channels of a layer that may be the largest: no other one exceeds them in every window.
    magnitudes: the mean magnitude of each over the tokens of each window, [windows][channels].
    No channel that is left out has the largest magnitude, in the text or in a window."""

    channels: tuple[int, ...]
    magnitudes: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, magnitudes: Float[np.ndarray, "windows C"]) -> Rivals:
        exceeded_by = (magnitudes[:, :, None] < magnitudes[:, None, :]).all(axis=0)  # [C, C]
        channels = np.flatnonzero(~exceeded_by.any(axis=-1))
        rows = (
            [float(f"{value:.{DIGITS}g}") for value in window] for window in magnitudes[:, channels]
        )
        return cls(tuple(channels.tolist()), tuple(map(tuple, rows)))

    def largest(self) -> int:
        """Return the channel with the largest mean of the text."""
        return self.channels[int(np.mean(self.magnitudes, axis=0).argmax())]

    def largest_by_window(self) -> Int[np.ndarray, "windows"]:
        """Return the channel with the largest mean of each window."""
        return np.asarray(self.channels)[np.argmax(self.magnitudes, axis=1)]


class Share(NamedTuple):
    """A share of the layers: with the largest channels of the whole text, and the mean share with
    the largest channels of one window."""

    of_text: float
    of_window: Estimate

    @classmethod
    def of(cls, text: Sequence[bool], windows: Sequence[Bool[np.ndarray, "windows"]]) -> Share:
        """Count layers: one entry for each in `text` and in `windows`."""
        shares = np.mean(windows, axis=0).tolist()
        return cls(float(np.mean(text)), Estimate(float(np.mean(shares)), mean_interval(shares)))


@dataclasses.dataclass(frozen=True)
class TextChannels:
    """One text: the largest channels of its keys, and of the latents X U of keys and of values, for
    each layer."""

    text: str
    keys: tuple[Rivals, ...]
    latent_k: tuple[Rivals, ...]
    latent_v: tuple[Rivals, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutlierChannelsReport(Report):
    """What was measured on each text. predicted: the first channels by |B^T[0]| in every layer, the
    largest entry first."""

    model: str
    tokens: int
    windows: int
    predicted: tuple[tuple[int, ...], ...]
    texts: tuple[TextChannels, ...]

    def accuracy(self, text: TextChannels, k: int) -> Share:
        """Return the share of the layers whose largest channel of keys is among the first k
        predictions."""
        named = [channels[:k] for channels in self.predicted]
        return Share.of(
            [rivals.largest() in top for rivals, top in zip(text.keys, named, strict=True)],
            [
                np.isin(rivals.largest_by_window(), top)
                for rivals, top in zip(text.keys, named, strict=True)
            ],
        )

    def first_is_largest(self, latents: Sequence[Rivals]) -> Share:
        """Return the share of the layers whose largest latent channel is the first one."""
        return Share.of(
            [rivals.largest() == 0 for rivals in latents],
            [rivals.largest_by_window() == 0 for rivals in latents],
        )

    def agreement(self) -> float:
        """Return the share of the layers in which all texts have the same largest channel of
        keys."""
        layers = zip(*(text.keys for text in self.texts), strict=True)
        channels = [{rivals.largest() for rivals in layer} for layer in layers]
        return float(np.mean([len(of_all_texts) == 1 for of_all_texts in channels]))


def channels_of(
    llama: Llama,
    windows: Int[np.ndarray, "windows T"],
    bases: Sequence[tuple[np.ndarray, np.ndarray]],
    text: str,
) -> TextChannels:
    """Return the outlier channels of one text by exact forward passes. bases: (U_k, U_v) of each
    layer."""
    by_window = [
        list(outlier_channels.layer_magnitudes(llama, window[None], iter(bases)))
        for window in windows
    ]
    keys, latent_k, latent_v = (
        tuple(
            Rivals.of(np.stack([getattr(magnitudes, side) for magnitudes in layer]))
            for layer in zip(*by_window, strict=True)
        )
        for side in ("keys", "latent_k", "latent_v")
    )
    return TextChannels(text, keys, latent_k, latent_v)


def run(options: argparse.Namespace) -> OutlierChannelsReport:
    """Measure every text. Raises ValueError if one is too short."""
    llama, tokenizer = load_llama(options.model, dtype="float32", weights="dense")
    parts = [
        [
            outlier_channels.decompose(np.asarray(p.kernel[...]))
            for p in (layer.k_proj, layer.v_proj)
        ]
        for layer in llama.layers
    ]
    bases, length = [(keys.u, values.u) for keys, values in parts], min(WINDOW, options.tokens)
    windows, texts = options.tokens // length, []
    for path in options.texts:
        tokens = first_tokens(tokenizer, path, options.tokens)[: windows * length]
        texts.append(channels_of(llama, tokens.reshape(windows, length), bases, path.name))
        progress(path.name)
    return OutlierChannelsReport(
        title=f"Outlier channels of keys from weights alone, {shown(options.model)}",
        **header(_command(options)),
        model=f"{shown(options.model)}, float32",
        tokens=options.tokens,
        windows=windows,
        predicted=tuple(
            tuple(outlier_channels.predicted_channels(keys).tolist()) for keys, _ in parts
        ),
        texts=tuple(texts),
    )


def _command(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line, files by their names."""
    texts = " ".join(path.name for path in options.texts)
    words = [f"--texts {texts}", f"--tokens {options.tokens}", f"--json {options.json.name}"]
    return ["laboratory.quality.outlier_channels", *model_words(options.model), *words]


def page(report: OutlierChannelsReport, file: pathlib.Path) -> str:
    """Render Table B.2, whether texts agree on the channels, and how often the first latent channel
    is the largest."""
    said = (
        f"Model: {report.model}, the first {report.tokens} tokens of each text in windows of"
        f" {WINDOW}. A prediction is right where the channel of keys with the largest mean"
        " magnitude is among the k largest entries of the first right singular vector of W_k."
        " The second number is the mean share if the largest channel is that of a window, with a"
        f" 95 % t interval over the {report.windows} windows of the text. The layers are all that"
        " the model has."
    )
    names = [text.text for text in report.texts]
    lines = [
        (f"k={k}", *(_percent(report.accuracy(text, k)) for text in report.texts)) for k in TOPS
    ]
    parts = [
        *head(report, file, said),
        table(("XQuant, Table B.2: layers predicted right", *names), lines),
    ]
    for side, name in (("latent_k", "keys"), ("latent_v", "values")):
        shares = (_percent(report.first_is_largest(getattr(text, side))) for text in report.texts)
        parts.append(
            table(
                (f"The first latent channel of {name} is the largest", *names),
                [("layers", *shares)],
            )
        )
    if len(report.texts) > 1:
        parts.append(
            f"All texts have the same channel in {100 * report.agreement():.1f} % of the layers."
        )
    return "\n\n".join(parts)


def _percent(share: Share) -> str:
    value, (low, high) = share.of_window
    window = with_interval(100 * value, (100 * low, 100 * high), ".1f")
    return f"{100 * share.of_text:.1f} %; of a window {window}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = study_parser("laboratory.quality.outlier_channels", __doc__)
    parser.add_argument(
        "--texts",
        metavar="FILE",
        type=pathlib.Path,
        nargs="+",
        required=True,
        help="the texts that the model reads",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=8192,
        help=f"tokens of each, in windows of {WINDOW}; intervals are over these",
    )
    run_study(parser, argv, run)


if __name__ == "__main__":
    main()
