"""The options of `kvq chat`."""

from __future__ import annotations

import argparse
import textwrap

from kvq_tools.cli.options import shared

MAX_DEFAULT_CAPACITY = 4096  # tokens of a cache by default, if the model has as many positions

COMMANDS = """\
/reset   forget the conversation and start again with an empty cache
/help    show this help
/quit    leave (or press Ctrl-D)
//...    say a line that begins with a slash, without the first one
Ctrl-C   stop an answer; the part that was shown stays in the conversation"""

DESCRIPTION = """\
Chats with a model. The whole conversation stays in one cache: each turn adds
its own tokens, and earlier turns are read from the cache, quantized. After each
answer one line shows the contents of the cache. Lines come from the terminal or
a pipe. The model needs a chat template. Sampling is what the model's
generation_config.json asks for, else greedy, unless you give --temperature,
--top-k, --top-p or --min-p."""

EPILOG = f"""\
examples:
  kvq chat smollm2 --cache kivi:bits=2             (after: kvq fetch smollm2)
  kvq chat smollm2 --cache innerq:bits=2 --temperature 0.7 --top-p 0.9 \\
      --system "You answer in one sentence."
  echo "Name three rivers." | kvq chat smollm2 --cache dense
  kvq prefill smollm2 --chat --prompt-file report.txt --cache kivi:bits=4 \\
      --capacity 8192 --out report.safetensors
  kvq chat smollm2 --from report.safetensors       (about the document)

in the conversation:
{textwrap.indent(COMMANDS, "  ")}

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_saved(
        parser,
        "go on from a file of `kvq prefill`: in a saved chat your first message ends the "
        "saved one, a saved text comes before the conversation",
    )
    shared.add_calibration(parser)
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="the system message (default: the one of the chat template, if any)",
    )
    shared.add_generation(parser, max_new_tokens=256)
    shared.add_number(
        parser,
        "--capacity",
        "S",
        f"tokens that the cache can hold (default: {MAX_DEFAULT_CAPACITY}, at most the positions "
        "that the model was trained for)",
    )
    shared.add_mesh(parser)
