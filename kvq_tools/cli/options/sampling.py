"""The options of generation that several commands share."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, values


def add_sampling(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the options of generation that `generate` and `chat` share."""
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=values.positive,
        default=max_new_tokens,
        help="stop after N tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help=(
            "0 is greedy (default: what the model's generation_config.json asks for, else greedy, "
            "or 1 with --top-k, --top-p or --min-p)"
        ),
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        help="sample from the K most probable tokens (0: all; default: the model's)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="sample from the fewest tokens whose probabilities add up to P (default: the model's)",
    )
    parser.add_argument(
        "--min-p",
        metavar="P",
        type=float,
        help="sample from tokens at least P times as probable as the best (default: the model's)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=values.seed,
        default=0,
        help="the same seed gives the same text (default: 0)",
    )
    shared.add_implementation(parser)
    shared.add_dtype(parser, one_cache=True)
