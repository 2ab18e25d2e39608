"""Read the prompt that a command line gives, as text, a file or token ids."""

from __future__ import annotations

import argparse
from typing import Any

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, text_input
from kvq_tools.cli.console import UserError

CHAT_NEEDS_TEXT = "--chat needs --prompt or --prompt-file: a chat template is filled with text"


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
        type=inputs.token_ids,
        help="token ids such as 1,2,3; needs no tokenizer",
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template"
    )
    return prompt


def has_prompt(options: argparse.Namespace) -> bool:
    """Return whether the options give a prompt."""
    return any(
        prompt is not None for prompt in (options.prompt, options.prompt_file, options.prompt_ids)
    )


def read_prompt(options: argparse.Namespace, config: LlamaConfig) -> tuple[Any, list[int]]:
    """Return (the tokenizer or None, the prompt's token ids). Raises UserError if there is no
    prompt."""
    text = (
        text_input.read_prompt(options.prompt_file)
        if options.prompt_file is not None
        else options.prompt
    )
    if text is not None:
        text_input.check_not_empty(text)
    if options.chat and text is None:
        raise UserError(CHAT_NEEDS_TEXT)
    tokenizer = text_input.load_tokenizer(options.model)
    if text is not None and tokenizer is None:
        raise UserError(
            f"{options.model!r} has no tokenizer; give token ids with --prompt-ids 1,2,3"
        )
    ids = (
        options.prompt_ids
        if text is None
        else text_input.encode(tokenizer, text, chat=options.chat)
    )
    text_input.check_tokens(ids, config)
    return tokenizer, ids
