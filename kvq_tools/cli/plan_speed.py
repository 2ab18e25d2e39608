"""Turn a speed into a memory budget: `kvq plan --device --tokens-per-second`."""

from __future__ import annotations

import argparse

from kvq_jax import peak_rates
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.weight_count import weight_count
from kvq_tools.cli.console import UserError, format_bytes

WEIGHT_BYTES = 2  # bfloat16


def budget(options: argparse.Namespace, config: LlamaConfig) -> float | int:
    """Return the budget: --budget, limited to the bytes that a step can read in batch / X seconds.
    One of the two is there.

    A step reads the whole cache and all weights once, except the unused rows of the embedding.
    Raises UserError or ValueError, in one line, if options are missing or if the weights alone take
    too long.
    """
    if (options.device is None) != (options.tokens_per_second is None):
        raise UserError("--device and --tokens-per-second belong together: give both or neither")
    if options.device is None:
        return options.budget
    if isinstance(options.budget, float):
        raise UserError(
            "a speed is a budget of bytes: give --budget in bytes as well, or leave it out"
        )
    if not options.tokens_per_second > 0:
        raise UserError("--tokens-per-second must be above 0")
    device = peak_rates.device(options.device)
    readable = device.bandwidth * options.batch / options.tokens_per_second
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = (weight_count(config) - unread) * WEIGHT_BYTES
    room = int(readable) - weights
    if room <= 0:
        raise ValueError(
            f"{options.tokens_per_second:g} tokens a second are out of reach: the weights"
            f" ({format_bytes(weights)}) alone take {weights / device.bandwidth * 1e3:.2f} ms of a"
            f" step on {device.name}, and {options.batch} sequences leave"
            f" {options.batch / options.tokens_per_second * 1e3:.2f}"
        )
    return room if options.budget is None else min(room, options.budget)
