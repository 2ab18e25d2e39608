"""The options that decide how tokens are sampled, and the rule that they give."""

from __future__ import annotations

import argparse
import dataclasses

from kvq_models.inference.sampling import Sampling
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli.console import UserError, input_errors, warn

GREEDY = Sampling()


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
    is refused with temperature 0. So is a seed, which implies nothing.
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
    of_lines = getattr(options, "prompts", None) is not None  # which may ask for sampling
    if options.seed and not temperature and not of_lines:
        raise UserError(
            f"--seed {options.seed} has no effect on greedy decoding: give a --temperature above 0,"
            " or leave it out"
        )
    base = model if temperature else GREEDY
    sampling = dataclasses.replace(base, temperature=temperature, **filters)
    with input_errors():
        sampling.check()
    return sampling
