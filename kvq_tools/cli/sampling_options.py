"""The options that decide how tokens are sampled, and the rule that they give."""

from __future__ import annotations

import argparse
import dataclasses

from kvq_models.inference.sampling import Sampling
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs
from kvq_tools.cli.console import UserError, input_errors, warn

GREEDY = Sampling()


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
        type=inputs.seed,
        default=0,
        help="the same seed gives the same text (default: 0)",
    )
    inputs.add_implementation(parser)
    inputs.add_dtype(parser, rows="rows of a quantized cache are bfloat16")


def model_sampling(config: LlamaConfig) -> Sampling:
    """Return the sampling that the checkpoint's generation_config.json (or GGUF file) asks for, as
    transformers applies it: greedy if it asks for none. Warn of what is not computed."""
    asked = config.generation
    if asked.unapplied:
        warn(f"the model asks for {', '.join(asked.unapplied)}, which kvq does not compute")
    return Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p)


def checked_sampling(options: argparse.Namespace, model: Sampling = GREEDY) -> Sampling:
    """Return the sampling rule: the options, and what the model asks for in place of those that are
    left out.

    An option that only makes sense with sampling implies temperature 1 if the model is greedy, and
    is refused with temperature 0.
    """
    names = ("top_k", "top_p", "min_p")
    filters = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sampled = [name for name, value in filters.items() if value != getattr(GREEDY, name)]
    temperature = options.temperature
    if temperature is None:
        temperature = model.temperature or (1.0 if sampled else 0.0)
    if sampled and not temperature:
        raise UserError(
            f"--{sampled[0].replace('_', '-')} has no effect at --temperature 0, which is greedy:"
            " leave out one of them"
        )
    base = model if temperature else GREEDY
    sampling = dataclasses.replace(base, temperature=temperature, **filters)
    with input_errors():
        sampling.check()
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
