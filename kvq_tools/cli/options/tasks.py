"""The options of `kvq passkey`, `kvq niah` and `kvq ruler`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, values

BATCH = 4

MAX_DEFAULT_LENGTH = 4096

SAMPLES, MAX_SAMPLES = 4, 10_000  # samples of each length and depth


def add_arguments(
    parser: argparse.ArgumentParser, max_new_tokens: int | None, default: str = "%(default)s"
) -> None:
    """Add the arguments that all of these commands take. max_new_tokens: the default, or None if it
    depends on the task. default: the default in words."""
    shared.add_model(parser)
    shared.add_caches(parser, "a cache; can be repeated (default: dense)")
    shared.add_calibration(parser, several=True)
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=values.positive,
        default=max_new_tokens,
        help=f"longest answer (default: {default})",
    )
    shared.add_number(parser, "--batch", "B", "prompts at a time", default=BATCH)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="make the prompt the user's turn in the tokenizer's chat template",
    )
    parser.add_argument(
        "--answers",
        metavar="F",
        help="write each answer to this new file as it comes, one JSON object per line",
    )
    shared.add_dtype(parser)


def add_generator_arguments(parser: argparse.ArgumentParser, text: str | None = None) -> None:
    """Add the arguments of tasks that make their own samples. `text` is the help of --text, for
    tasks that hide facts at depths of one."""
    parser.add_argument(
        "--data",
        type=values.file_name,
        metavar="FILE",
        help="ready-made samples, one JSON object per line, instead of generated ones",
    )
    parser.add_argument(
        "--lengths",
        metavar="L,L",
        type=_integers,
        help=(
            "tokens of prompt and answer (default: a quarter, a half and all of the model's "
            f"positions, of at most {MAX_DEFAULT_LENGTH}, as far as the question fits)"
        ),
    )
    if text is not None:
        parser.add_argument(
            "--depths",
            metavar="D,D",
            type=_shares,
            help="positions of the fact, 0 to 1 (default: 0,0.25,0.5,0.75,1)",
        )
        parser.add_argument("--text", metavar="FILE", help=text)
    shared.add_number(
        parser, "--seed", "SEED", "seed of generated samples (default: 0)", type=values.seed
    )
    each = "each length" if text is None else "each length and depth"
    shared.add_number(
        parser, "--limit", "N", f"samples for {each} (default: {SAMPLES}); of --data, its first N"
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values.positive(part) for part in text.split(",")))


def _shares(text: str) -> tuple[float, ...]:
    try:
        depths = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers; write 0,0.5,1"
        ) from None
    if not all(0 <= depth <= 1 for depth in depths):
        raise argparse.ArgumentTypeError(f"depths must be between 0 and 1, got {text}")
    return tuple(dict.fromkeys(depths))
