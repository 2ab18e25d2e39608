"""The options of `kvq plan`."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple, TypeAlias

from kvq_jax.peak_rates import DEVICES
from kvq_tools.cli.options import shared, values
from kvq_tools.planning.defaults import (
    CODE,
    KEY_BASES,
    LENGTH,
    LONGEST,
    MEASURED,
    SAMPLES,
    VALUE_BASES,
    WINDOW,
    WINDOWS,
)


class Bits(NamedTuple):
    """A budget in bits per element."""

    bits: float


class Bytes(NamedTuple):
    """A budget in resident bytes."""

    nbytes: int


Budget: TypeAlias = Bits | Bytes

_BITS = re.compile(r"(\d{1,18}(?:\.\d+)?) *bits?", re.IGNORECASE)

_WIDTHS = ", ".join(f"{bits:g}" for bits in MEASURED)

DESCRIPTION = f"""\
Finds the cache with the least KL to full precision for a budget: bits per
stored element, or resident bytes at a context and a batch (windows and what the
method adds to the model included). Prints the spec for --cache, beside those of
other budgets. It needs a budget and, the first time for a model, a text.

With --text, it measures. waterfill is calibrated on the first half of the text
({SAMPLES} x {LENGTH} tokens). Then every side of every layer is read through the cache by
itself, at {_WIDTHS} bits, on windows of the second half and of --other-text.
This gives the widths of all layers. The best caches of the budget, also of
other methods and with more exact tokens for fewer bits, are then read as a
whole on further windows of both texts, and the one with the least compared KL
wins: the geometric mean over both texts, (1 + 2s) times if a cache keeps a
share s more of the windows exact, because that share is smaller in a longer
context. Its ratio to the winner's has an interval, which says whether these
windows tell the two apart. They chose the winner, so its KL elsewhere is rather
higher: kvq eval --protocol measures it. Every number is saved at once: after
Ctrl-C the same command continues, and another budget for the same model and
texts measures only its last step.

With --fast or without a text, nothing is measured: widths come from the
energies of waterfill's calibration, which also predicts the KL, to second
order, for tokens outside the windows. This prediction ranks budgets. The
calibration is --calibration, or the one that an earlier plan with a text kept.
--cache auto:bits=2.5 does the same in every command.

--device and --tokens-per-second turn a speed into a budget: the bytes that a
device can read in a step, after the weights, at the peak rate of its memory. No
device is that fast, so a cache that does not fit even then is too large."""

EPILOG = """\
examples:
  kvq plan smollm2 --text wiki.txt --budget 2.5bits --picture front.png
  kvq plan smollm2 --text wiki.txt --budget 150MiB --context 8192 --batch 4 \\
      --out plan.json
  kvq generate smollm2 --prompt "It was" --cache plan.json
  kvq plan smollm2 --text wiki.txt --budget 2.5bits --key-basis eigen \\
      --value-basis rotation
  kvq plan smollm2 --budget 3bits       (fast, from what the first command kept)
  kvq plan path/to/model --calibration w.safetensors --device h200 \\
      --tokens-per-second 2000 --context 32768 --batch 32"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    parser.add_argument(
        "--budget",
        metavar="2.5bits|600MiB",
        type=_budget,
        help="bits per element, or the resident bytes of a cache",
    )
    parser.add_argument("--text", metavar="FILE", help="a UTF-8 text to calibrate and measure on")
    parser.add_argument(
        "--other-text",
        metavar="FILE",
        help=(
            "with --text: a text of another kind to measure on as well, so that the plan is not"
            " for one kind of text"
            f" (default: sources of {CODE})"
        ),
    )
    parser.add_argument(
        "--fast", action="store_true", help="with --text: only calibrate on it, and measure nothing"
    )
    parser.add_argument(
        "--calibration",
        metavar="F",
        help=(
            "a file that `kvq calibrate` wrote for waterfill, with any budget (default: see above)"
        ),
    )
    parser.add_argument(
        "--key-basis",
        choices=(*KEY_BASES, "best"),
        help=(
            "waterfill's channels of keys: RoPE pairs, which all kernels read fastest, an"
            " eigenbasis, whose KL is lower, or the better of both (default: pairs, or what"
            " --calibration was made for)"
        ),
    )
    parser.add_argument(
        "--value-basis",
        choices=(*VALUE_BASES, "best"),
        help=(
            "waterfill's channels of values: an eigenbasis, a fixed rotation, whose KL is lower"
            " beside keys in an eigenbasis, or the better of both (default: eigen, or what"
            " --calibration was made for)"
        ),
    )
    shared.add_sequences(parser)
    shared.add_fixed_dtype(parser, "full-precision rows")
    _add_speed(parser)
    shared.add_number(
        parser,
        "--window",
        "W",
        f"tokens per measured window (default: at most {WINDOW}, and {LONGEST} for whole caches)",
    )
    shared.add_number(parser, "--windows", "N", f"measured windows (default: {WINDOWS})")
    parser.add_argument(
        "--work",
        type=values.directory_name,
        metavar="DIR",
        help="keep calibration and measurements here, and find those of earlier plans here"
        " (default: kvq's cache folder, the only one where --cache auto: looks)",
    )
    parser.add_argument(
        "--out",
        metavar="F.json",
        help="write the cache, with the path of its calibration, to a file for --cache",
    )
    parser.add_argument(
        "--picture", metavar="F.png", help="plot KL against bits (needs matplotlib)"
    )


def _budget(text: str) -> Budget:
    if match := _BITS.fullmatch(text.strip()):
        return Bits(float(match[1]))
    try:
        return Bytes(values.byte_size(text))
    except values.NotASizeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a budget; write 2.5bits, 600MiB or a number of bytes"
        ) from None


def _add_speed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=(
            f"with --tokens-per-second: {', '.join(DEVICES)}, or peaks FLOPS:BYTES, "
            "such as 756e12:2e12"
        ),
    )
    shared.add_number(
        parser,
        "--tokens-per-second",
        "X",
        "total over all sequences, at the full context",
        type=float,
    )
