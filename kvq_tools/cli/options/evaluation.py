"""The options of `kvq eval` and `kvq report`: a text, caches, and how they are evaluated on
it."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, values
from kvq_tools.evaluation.defaults import BATCH, BUCKETS, CHUNK, MAX_WINDOW, MODES, PROMPT, STEP


def add_request(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the text, the caches and the evaluation's settings. `checked` reads them."""
    parser.add_argument(
        "--text", metavar="FILE", required=required, help="the UTF-8 text to predict"
    )
    shared.add_caches(parser, required=required)
    shared.add_calibration(parser, several=True)
    _add_settings(parser)
    shared.add_dtype(
        parser, beside="; in bfloat16, --cache dense shows the effect of rounding alone"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add how a text is cut into windows and read."""
    shared.add_number(
        parser,
        "--window",
        "W",
        f"tokens per window (default: the model's max_position_embeddings, at most {MAX_WINDOW})",
    )
    shared.add_number(
        parser, "--stride", "S", "tokens from one window to the next (default: half a window)"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="decode",
        help="how the cache is used (default: %(default)s)",
    )
    shared.add_number(
        parser, "--chunk", "C", f"tokens per chunk in --mode chunked (default: {CHUNK})"
    )
    shared.add_number(
        parser,
        "--prompt",
        "P",
        "in --mode decode, prefill the first P tokens of each window without scoring them "
        "and the next one, which is predicted before the cache is read "
        f"(default: 0, or {PROMPT} and at most the overlap of two windows if one of the "
        "caches takes statistics from a prompt)",
        type=values.count,
    )
    shared.add_number(
        parser,
        "--step",
        "T",
        "tokens per step in --mode decode; fused GPU kernels serve 1, larger steps are "
        f"faster (default: {STEP})",
    )
    shared.add_number(parser, "--batch", "B", "windows at a time", default=BATCH)
    shared.add_number(parser, "--limit", "TOKENS", "read only the first TOKENS tokens of the text")
    shared.add_number(
        parser, "--buckets", "N", "parts of a window, for numbers by position", default=BUCKETS
    )
