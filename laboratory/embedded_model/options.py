"""The options of training the embedded model."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_CURRICULUM = "256:600,512:300,1024:300,2048:100"


def parse_arguments(arguments: list[str], description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.embedded_model.train",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        required=True,
        help="directory of *.txt files; a line <|endoftext|> ends a document",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="run directory: tokenizer, token stream, checkpoint, history, loss curve",
    )
    parser.add_argument(
        "--curriculum",
        default=DEFAULT_CURRICULUM,
        help=(
            "row length and steps of each phase, for example 256:800,1024:400 (default"
            " %(default)s);\nphases not yet begun, and the rates, may be changed when a run is"
            " continued"
        ),
    )
    parser.add_argument(
        "--decay-steps",
        type=int,
        default=1200,
        help="the learning rate falls linearly to zero over the last N steps (default %(default)s)",
    )
    parser.add_argument(
        "--warmup-steps",
        type=int,
        default=20,
        help="steps of rising learning rate (default %(default)s)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=4.5e-3,
        help="peak learning rate (default %(default)s)",
    )
    parser.add_argument(
        "--embedding-rate",
        type=float,
        default=0.4,
        help="learning rate of embedding and norms relative to the matrices (default %(default)s)",
    )
    parser.add_argument(
        "--weight-decay", type=float, default=0.01, help="of the matrices (default %(default)s)"
    )
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        default=2048,
        help="tokens of one update (default %(default)s)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=2048, help="byte-level BPE tokens (default %(default)s)"
    )
    parser.add_argument(
        "--hidden-size",
        type=int,
        default=256,
        help=(
            "model width, a multiple of 128: heads are 64 wide, 2 per KV head (default %(default)s)"
        ),
    )
    parser.add_argument(
        "--intermediate-size", type=int, default=512, help="MLP width (default %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="decoder layers (default %(default)s)"
    )
    parser.add_argument(
        "--initialization",
        choices=("induction", "random"),
        default="induction",
        help=(
            "start with an induction circuit wired into layers 0 and 1, or all random (default"
            " %(default)s)"
        ),
    )
    parser.add_argument(
        "--until",
        type=int,
        help="stop after this step, resumably (default: the end of the curriculum)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and rows (default %(default)s)"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=25,
        help="steps between checkpoints (default %(default)s)",
    )
    parser.add_argument(
        "--probe-every",
        type=int,
        default=75,
        help="steps between held-out losses (default %(default)s)",
    )
    return parser.parse_args(arguments)
