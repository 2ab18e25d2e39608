"""Render conversations with the chat template of a tokenizer, which is a program from the
checkpoint."""

from __future__ import annotations

from typing import Any


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return a conversation in the tokenizer's chat template, up to the beginning of the model's
    next answer.

    Raises ValueError, in one line, if the template cannot take it.
    """
    try:
        from jinja2 import TemplateError  # imported late: only chat templates need it
    except ImportError as error:
        raise ValueError("chat templates need jinja2; pip install jinja2") from error
    failures = (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except failures as error:  # a template may do anything
        raise ValueError(
            f"the tokenizer's chat template fails: {str(error) or type(error).__name__}"
        ) from error
