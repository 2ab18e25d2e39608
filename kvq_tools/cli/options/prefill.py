"""The options of `kvq prefill`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared

ROOM = 512  # tokens of a question and its answer

DESCRIPTION = """\
Reads a prompt with a Llama-family checkpoint and saves the cache that holds it
as a safetensors file with a checksum. `kvq generate --from` continues from the
file, in another process or on another machine with the same model, and gives
the tokens that `kvq generate` with this prompt would give. With a --prompt it
asks a question about the saved text, which is not read again: one file answers
many questions. With --chat the text is the beginning of a user's message, which
the question ends."""

EPILOG = f"""\
examples:
  kvq prefill smollm2 --cache kivi:bits=4 --prompt-file report.txt \\
      --out report.safetensors
  kvq generate smollm2 --from report.safetensors --max-new-tokens 100
  kvq chat smollm2 --from report.safetensors

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_prompt(parser, required=True)
    shared.add_cache(parser)
    shared.add_calibration(parser)
    parser.add_argument(
        "--out", metavar="F", required=True, help="the file to write, such as prompt.safetensors"
    )
    shared.add_number(
        parser,
        "--capacity",
        "S",
        "tokens that the cache can hold, including those still to be generated (default: "
        f"the prompt and {ROOM} more)",
    )
    shared.add_implementation(parser)
    shared.add_dtype(parser, one_cache=True)
