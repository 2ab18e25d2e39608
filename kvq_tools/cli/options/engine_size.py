"""The options that set the size of an engine's caches."""

from __future__ import annotations

import argparse

from kvq_models.inference.engine.limits import MOST_SLOTS, SLOTS
from kvq_tools.cli.options import values


def add_size(parser: argparse.ArgumentParser, *, capacity: bool = True) -> None:
    """Add the options that set an engine's size. `size_of` reads them."""
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        type=values.byte_size,
        help=(
            "memory for the caches, such as 8GiB: uses as many slots as fit, at most "
            f"{MOST_SLOTS} (weights not counted)"
        ),
    )
    parser.add_argument(
        "--slots",
        metavar="B",
        type=values.positive,
        help=f"requests at a time (default: {SLOTS}, or as many as fit into --memory)",
    )
    if capacity:
        parser.add_argument(
            "--capacity",
            metavar="S",
            type=values.positive,
            help="tokens per slot (default: the positions that the model was trained for)",
        )
