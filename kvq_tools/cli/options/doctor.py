"""The options of `kvq doctor`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, values

DESCRIPTION = """\
Explains layer by layer what a cache will apply to a model, what it leaves in
full precision, and why: resolved bits and groups, packing and its padding,
skipped layers, and whether a kernel or XLA reads it, and why. Looks at
head_dim, QK-norm, RoPE, the sliding window and the bias of the key projection,
and warns of known problems. Says whether the cache needs a calibration, and
whether the one given fits this cache and model. Of the weights, it reads only
the biases of k_proj and, for a calibration, those that identify a model (norms
and two projections), and only from a local directory."""

EPILOG = f"""\
examples:
  kvq doctor path/to/Qwen2.5-1.5B --cache innerq:bits=2

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_cache(parser)
    shared.add_calibration(parser)
    shared.add_number(
        parser,
        "--context",
        "S",
        "capacity in tokens (default: the model's max_position_embeddings)",
        type=values.token_count,
    )
