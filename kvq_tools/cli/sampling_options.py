"""The options that decide how tokens are sampled, and the rule that they give."""

from __future__ import annotations

import argparse

from kvq_models.inference.sampling import Sampling
from kvq_tools.cli import inputs
from kvq_tools.cli.console import UserError, input_errors


def add_sampling(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the options of generation that `generate` and `chat` share."""
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=inputs.positive,
        default=max_new_tokens,
        help="stop after N tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help="0 is greedy (default; 1 if --top-k, --top-p or --min-p is given)",
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        default=0,
        help="sample from the K most probable tokens (default: all)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="sample from the fewest tokens whose probabilities add up to P",
    )
    parser.add_argument(
        "--min-p",
        metavar="P",
        type=float,
        default=0.0,
        help="sample from tokens at least P times as probable as the best one",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=inputs.seed,
        default=0,
        help="the same seed gives the same text (default: 0)",
    )
    inputs.add_implementation(parser)
    inputs.add_dtype(parser, rows="rows of a quantized cache are bfloat16")


def checked_sampling(options: argparse.Namespace) -> Sampling:
    """Return the sampling rule. An option that only makes sense with sampling implies temperature
    1, and is refused with temperature 0."""
    asked = {"top-k": options.top_k > 0, "top-p": options.top_p < 1, "min-p": options.min_p > 0}
    sampled = [name for name, is_set in asked.items() if is_set]
    if options.temperature is None:
        options.temperature = 1.0 if sampled else 0.0
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    with input_errors():
        sampling.check()
    if sampled and not options.temperature:
        raise UserError(
            f"--{sampled[0]} has no effect at --temperature 0, which is greedy: leave out one of"
            " them"
        )
    return sampling


def sampling_in_words(sampling: Sampling) -> str:
    """Return the sampling rule in words."""
    if not sampling.temperature:
        return "greedy"
    limits = (
        ("top-k", sampling.top_k, 0),
        ("top-p", sampling.top_p, 1),
        ("min-p", sampling.min_p, 0),
    )
    return ", ".join(
        [
            f"temperature {sampling.temperature:g}",
            *(f"{name} {value:g}" for name, value, all_ in limits if value != all_),
        ]
    )
