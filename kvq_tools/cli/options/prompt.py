"""The options that give a prompt."""

from __future__ import annotations

import argparse
from typing import Any

from kvq_tools.cli.options import values


def add_prompt(parser: argparse.ArgumentParser, *, required: bool) -> Any:
    """Add the options that give a prompt, which exclude each other, and return their group."""
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--prompt", metavar="P", help="the text to continue")
    prompt.add_argument(
        "--prompt-file",
        metavar="F",
        help="a UTF-8 file with the text to continue, or - for stdin",
    )
    prompt.add_argument(
        "--prompt-ids",
        metavar="IDS",
        type=values.token_ids,
        help="token ids such as 1,2,3; needs no tokenizer",
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template"
    )
    return prompt
