"""Count how often the key projection's weights alone name the channel of key outliers: Table B.2 of
the XQuant paper, one or more texts.

    accuracy(k)   share of the layers whose channel of keys with the largest mean magnitude is among
                  the k largest of |B^T[0]|, W_k = U S B^T
    first         share of the layers whose largest latent channel of X U is the first one

`kvq doctor MODEL --outliers --text FILE` shows the same for one text, layer by layer. Keys are
before RoPE, with their bias and QK-norm. Means are over all tokens of a text, which is read in
windows. A bootstrap over these draws whole windows, and looks again for the largest channel of
every layer; the layers are the model's own and are not drawn.

    python -m laboratory.quality.outlier_channels --texts wikitext2_test.txt tinyshakespeare.txt
    --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from benchmarks.markdown import bracket, head, table
from benchmarks.quality.intervals import Estimate, Weights, estimate
from benchmarks.quality.model_names import model_words, shown
from benchmarks.report_file import Report, header
from kvq_models import Llama, load_llama
from laboratory import outlier_channels
from laboratory.outlier_channels import TOPS
from laboratory.study import first_tokens, run_study, study_parser

WINDOW = 512  # tokens; every window is a sequence of its own
DIGITS = 6  # of a stored magnitude


@dataclasses.dataclass(frozen=True)
class Rivals:
    """The channels of a layer that may be the largest: no other one exceeds them in every window.
    magnitudes: the mean magnitude of each over the tokens of each window, [windows][channels].
    Whatever the weights of the windows, no channel that is left out has the largest mean."""

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

    def largest(self, weights: Weights) -> Int[np.ndarray, "sets"]:
        """Return the channel with the largest mean of each set of windows."""
        return np.asarray(self.channels)[(weights @ np.asarray(self.magnitudes)).argmax(axis=1)]


@dataclasses.dataclass(frozen=True)
class TextChannels:
    """One text: the largest channels of its keys, and of the latents X U of keys and of values, for
    each layer."""

    text: str
    keys: tuple[Rivals, ...]
    latent_k: tuple[Rivals, ...]
    latent_v: tuple[Rivals, ...]

    def channels(self, weights: Weights) -> Int[np.ndarray, "layers sets"]:
        """Return the channel of keys with the largest mean magnitude in every layer, for each set
        of windows."""
        return np.stack([rivals.largest(weights) for rivals in self.keys])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutlierChannelsReport(Report):
    """What was measured on each text. predicted: the first channels by |B^T[0]| in every layer, the
    largest entry first."""

    model: str
    tokens: int
    windows: int
    predicted: tuple[tuple[int, ...], ...]
    texts: tuple[TextChannels, ...]

    def accuracy(self, text: TextChannels, k: int) -> Estimate:
        """Return the share of the layers whose largest channel of keys is among the first k
        predictions."""
        named = np.asarray([channels[:k] for channels in self.predicted])  # [layers, k]
        return estimate(
            lambda weights: (
                (text.channels(weights)[..., None] == named[:, None]).any(axis=-1).mean(axis=0)
            ),
            self.windows,
        )

    def first_is_largest(self, latents: Sequence[Rivals]) -> Estimate:
        """Return the share of the layers whose largest latent channel is the first one."""
        return estimate(
            lambda weights: np.mean([rivals.largest(weights) == 0 for rivals in latents], axis=0),
            self.windows,
        )

    def agreement(self) -> Estimate:
        """Return the share of the layers in which all texts have the same largest channel of keys.
        The texts' windows are drawn alike."""

        def share(weights: Weights) -> Float[np.ndarray, "sets"]:
            first, *others = (text.channels(weights) for text in self.texts)
            return np.all([other == first for other in others], axis=0).mean(axis=0)

        return estimate(share, self.windows)


def channels_of(
    llama: Llama,
    windows: Int[np.ndarray, "windows T"],
    bases: Sequence[tuple[np.ndarray, np.ndarray]],
    text: str,
) -> TextChannels:
    """Return the outlier channels of one text by exact forward passes. bases: (U_k, U_v) of each
    layer."""
    found = [
        list(outlier_channels.layer_magnitudes(llama, window[None], iter(bases)))
        for window in windows
    ]
    keys, latent_k, latent_v = (
        tuple(
            Rivals.of(np.stack([getattr(magnitudes, side) for magnitudes in layer]))
            for layer in zip(*found, strict=True)
        )
        for side in ("keys", "latent_k", "latent_v")
    )
    return TextChannels(text, keys, latent_k, latent_v)


def run(options: argparse.Namespace) -> OutlierChannelsReport:
    """Measure every text. ValueError where one is too short."""
    llama, tokenizer = load_llama(options.model, dtype="float32")
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
        print(path.name, file=sys.stderr, flush=True)
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
        f" Brackets hold 95 % bootstrap intervals over the {report.windows} windows of a text; the"
        " layers are all that the model has."
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
            f"All texts have the same channel in {_percent(report.agreement())} of the layers."
        )
    return "\n\n".join(parts)


def _percent(share: Estimate) -> str:
    return (
        f"{100 * share.value:.1f}"
        f" %{bracket((100 * share.interval.low, 100 * share.interval.high), '.1f')}"
    )


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
