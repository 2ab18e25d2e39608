"""The options of `kvq demo`."""

from __future__ import annotations

import argparse

from kvq_models.named_models.names import EMBEDDED_NAME
from kvq_tools.cli.options import shared, values

CACHES = ("dense", "kivi:bits=4", "kivi:bits=2", "innerq:bits=2")

CONTEXT = 2048

NEW_TOKENS = 64

LAYER_MODEL = "Llama-3.1-8B"
LAYER_CONTEXTS = (1024, 4096, 16384, 32768)

DESCRIPTION = f"""\
Runs a model with several caches and compares them. The first half of a text is
the prompt. Each cache then (1) continues it with the same random numbers, so
that only the cache makes texts differ, and (2) predicts the second half token
by token, reading what it stored, which gives the perplexity. Bytes are those of
the whole cache at the text's length, windows included, beside a dense bf16
cache of the same capacity. Resident bytes also count what a method adds to the
model, and its working memory. tokens/s is decoding alone, without compilation.
A small model on a short text is no faster with a packed cache. So the demo also
times attention in one layer of {LAYER_MODEL} on this machine, at up to {LAYER_CONTEXTS[-1] >> 10}K
tokens. Without arguments: the embedded model, the opening of Pride and
Prejudice, and {", ".join(CACHES)}."""

EPILOG = f"""\
examples:
  kvq demo
  kvq demo --model path/to/model --text notes.txt --cache dense \\
      --cache kivi:bits=2,recent=32

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=EMBEDDED_NAME, help=f"{shared.MODEL_HELP} (default: %(default)s)"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="a UTF-8 text (default: the passage that ships with kvq)"
    )
    shared.add_caches(parser)
    shared.add_calibration(parser, several=True)
    shared.add_number(
        parser,
        "--context",
        "S",
        "use at most S tokens of the text, and never more than the model was trained for",
        type=values.token_count,
        default=CONTEXT,
    )
    shared.add_number(parser, "--new-tokens", "N", "tokens to generate", default=NEW_TOKENS)
