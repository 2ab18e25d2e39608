"""Read the prompt that a command line gives, as text, a file or token ids."""

from __future__ import annotations

import argparse
from typing import Any

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import text_input
from kvq_tools.cli.console import UserError
from kvq_tools.cli.handover import SavedPrompt
from kvq_tools.cli.opening import Opening, continued, opening

CHAT_NEEDS_TEXT = "--chat needs --prompt or --prompt-file: a chat template is filled with text"


def has_prompt(options: argparse.Namespace) -> bool:
    """Return whether the options give a prompt."""
    return any(
        prompt is not None for prompt in (options.prompt, options.prompt_file, options.prompt_ids)
    )


def prompt_from_options(
    options: argparse.Namespace, config: LlamaConfig
) -> tuple[Any, list[int], Opening | None]:
    """Return (the tokenizer or None, the prompt's token ids, its text unless it was given as ids).

    Raises UserError if there is no prompt.
    """
    text = prompt_text(options)
    tokenizer = text_input.load_tokenizer(options.model)
    if text is None:
        text_input.check_tokens(options.prompt_ids, config)
        return tokenizer, options.prompt_ids, None
    check_tokenizer(tokenizer, options)
    ids = text_input.encode(tokenizer, text, chat=options.chat)
    text_input.check_tokens(ids, config)
    return tokenizer, ids, opening(tokenizer, text, chat=options.chat)


def read_question(
    options: argparse.Namespace, config: LlamaConfig, saved: SavedPrompt
) -> tuple[Any, int, list[int]]:
    """Return (the tokenizer or None, the tokens of the saved prompt that stay, the joined prompt).

    Raises UserError if the options give a chat and the file holds none.
    """
    before = saved.opening
    if options.chat and not (before and before.chat):
        raise UserError(
            f"{saved.path!r} holds a text, not a chat: leave out --chat, or give it to kvq prefill"
        )
    tokenizer = text_input.load_tokenizer(options.model)
    if not has_prompt(options):
        return tokenizer, len(saved.prompt), saved.prompt
    question = prompt_text(options)
    if question is None:
        kept, ids = len(saved.prompt), saved.prompt + options.prompt_ids
    else:
        check_tokenizer(tokenizer, options)
        kept, ids = continued(tokenizer, saved.prompt, before, question)
    text_input.check_tokens(ids, config)
    return tokenizer, kept, ids


def prompt_text(options: argparse.Namespace) -> str | None:
    """Return the prompt's text, or None if it is given as token ids. Raises UserError if it is
    empty."""
    text = (
        text_input.read_prompt_file(options.prompt_file)
        if options.prompt_file is not None
        else options.prompt
    )
    if text is not None:
        text_input.check_not_empty(text)
    elif options.chat and has_prompt(options):
        raise UserError(CHAT_NEEDS_TEXT)
    return text


def check_tokenizer(tokenizer: Any, options: argparse.Namespace) -> None:
    if tokenizer is None:
        raise UserError(
            f"{text_input.without_tokenizer(options.model)}; give token ids with --prompt-ids 1,2,3"
        )
