"""Read texts and prompts, and turn them into tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq_models.llama import checkpoint
from kvq_models.llama.config import LlamaConfig
from kvq_tools import chat_template
from kvq_tools.cli.console import UserError, input_errors, note


def read_text(path: str) -> str:
    """Read a UTF-8 text without the byte-order mark that some editors write. It is not empty."""
    if not path:  # which Path takes for the current directory
        raise UserError("the name of a file is empty; name a file with a text")
    with input_errors():
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path!r} is not UTF-8 text; save it as UTF-8: {error}") from error
    if not text:
        raise UserError(f"{path!r} is empty; name a file with a text")
    return text


def read_prompt_file(path: str) -> str:
    """Read a prompt from a file, or from stdin if the path is `-`."""
    if path != "-":
        return read_text(path)
    check_stdin()
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is not UTF-8 text; convert it to UTF-8: {error}") from error
    except OSError as error:
        raise unreadable_stdin(error) from error


def check_stdin() -> None:
    """Raise UserError if stdin was closed by the caller (`<&-`)."""
    if sys.stdin is None:
        raise UserError("stdin is closed; redirect it from a file, a pipe or a terminal")


def unreadable_stdin(error: OSError) -> UserError:
    """Return the error about a stdin that cannot be read, such as a file open for writing."""
    reason = error.strerror or str(error)
    return UserError(f"stdin cannot be read: {reason}; redirect it from a file or a pipe")


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer alone. None if the checkpoint has none."""
    with input_errors():
        return checkpoint.open_checkpoint(model, "tokenizer").tokenizer()


def need_tokenizer(model: str, use: str) -> Any:
    """Load the tokenizer. If the checkpoint has none, raise a UserError that says what it is needed
    for."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"{without_tokenizer(model)}, which is needed to {use}")
    return tokenizer


def without_tokenizer(model: str) -> str:
    """Return the beginning of an error about a checkpoint that has no tokenizer."""
    unread = " (add a tokenizer.json: tekken.json is not read)"
    return f"{model!r} has no tokenizer{unread * (Path(model) / 'tekken.json').exists()}"


def encode(tokenizer: Any, text: str, *, chat: bool = False) -> list[int]:
    """Return the token ids of a prompt. With `chat`, the prompt is the user's turn in the chat
    template."""
    if chat:
        messages = [{"role": "user", "content": text}]
        return chat_template.encoded(tokenizer, render_chat(tokenizer, messages))
    check_text(text)
    return list(tokenizer(text, verbose=False).input_ids)  # not verbose: lengths are checked here


def check_enough_text(ids: list[int], length: int) -> None:
    """Raise UserError, with the remedy, if a text is too short for a sample of `length` tokens and
    the token after it."""
    if len(ids) <= length:
        shorter = f", or --length {len(ids) - 1}" if len(ids) > 1 else ""
        raise UserError(
            f"a length of {length} needs a text of at least {length + 1} tokens, and this one has"
            f" {len(ids)}: give a longer --text{shorter}"
        )


def check_not_empty(prompt: str) -> None:
    """Raise UserError for an empty prompt, even if the tokenizer would put a token before it."""
    if not prompt:
        raise UserError("the prompt is empty; give at least one character")


def check_text(text: str, what: str = "the prompt") -> None:
    """Raise UserError, which calls the text `what`, for half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not UTF-8 text; convert it to UTF-8: {error}") from error


def render_chat(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return a conversation in the tokenizer's chat template, up to the start of the model's next
    answer."""
    for message in messages:
        check_text(message["content"])
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "this model's tokenizer has no chat template; `kvq generate` continues a text"
            " without one"
        )
    try:
        safe = chat_template.marked(tokenizer, tokenizer.get_chat_template(), messages)
        return chat_template.rendered(tokenizer, safe)
    except ValueError as error:
        raise UserError(error) from error


def advise_chat(tokenizer: Any, advice: str, *, ended_at_once: bool) -> None:
    """Say on stderr why an answer to a text is empty, if the model expects a chat template."""
    if ended_at_once and getattr(tokenizer, "chat_template", None):
        note(f"the model ended at once; it was trained on chats: {advice}")


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two lists have in common at their beginnings."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def check_tokens(ids: list[int], config: LlamaConfig) -> None:
    if not ids:
        raise UserError("the prompt is empty; give at least one token")
    outside = [i for i in ids if not 0 <= i < config.vocab_size]
    if outside:
        raise UserError(
            f"token id {outside[0]} is outside the model's vocabulary of {config.vocab_size}"
        )
