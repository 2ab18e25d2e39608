"""Render conversations with the chat template of a tokenizer, which is a program from the
checkpoint, and turn them into tokens.

A message that spells a special token, such as <|im_end|>, must not end its turn. So before it is
rendered, a mark goes after the first character of each such text. Templates take the mark for any
character, no tokenizer finds the token, and the mark's own token is left out of the ids. The mark
is a noncharacter, which no text needs.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvq_tools.template_process import TemplateProcess

MARK = "\ufdd0"
MAX_CHARACTERS = 1 << 26  # of a rendered conversation


def rendered(tokenizer: Any, messages: list[dict[str, str]], *, continues: bool = False) -> str:
    """Return a conversation in the tokenizer's chat template, up to the beginning of the model's
    next answer, or up to the end of the last message if that `continues`.

    Raises ValueError, in one line, if the template cannot take it.
    """
    template = tokenizer.get_chat_template()
    names = special_names(tokenizer)
    return _process().render(template, messages, names, MAX_CHARACTERS, continues=continues)


def special_names(tokenizer: Any) -> dict[str, str]:
    """Return the special tokens by the names that templates have for them, such as bos_token."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items()}


@functools.cache
def _process() -> TemplateProcess:
    process = TemplateProcess()
    atexit.register(process.close)
    return process


def start() -> None:
    """Start the process of `rendered`, which takes about a second, and do not wait for it."""
    _process().start()


def marked(tokenizer: Any, template: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return messages in which no text spells a special token, or a token that the template names.
    An assistant may spell the latter: templates look for the end of its thoughts."""
    by_template, special = _patterns(tokenizer, template)
    return [
        {
            name: mark_text(special if message.get("role") == "assistant" else by_template, text)
            for name, text in message.items()
        }
        for message in messages
    ]


def marked_names(tokenizer: Any, template: str, value: Any) -> Any:
    """Return what a client gives the template to read, with marks in its texts."""
    if isinstance(value, str):
        return mark_text(_patterns(tokenizer, template)[0], value)
    if isinstance(value, list):
        return [marked_names(tokenizer, template, one) for one in value]
    if isinstance(value, dict):
        return {
            mark_text(_patterns(tokenizer, template)[0], name): marked_names(
                tokenizer, template, one
            )
            for name, one in value.items()
        }
    return value


def mark_text(pattern: re.Pattern[str] | None, text: str) -> str:
    return text if pattern is None else pattern.sub(lambda match: match[0] + MARK, text)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a rendered conversation. Marks are left out, and nothing is added: the
    template writes special tokens itself."""
    if MARK not in text:
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    marking = _marking(tokenizer)
    mark = marking.convert_tokens_to_ids(MARK)
    ids = marking(text, add_special_tokens=False, verbose=False).input_ids
    return [token for token in ids if token != mark]


@functools.lru_cache(maxsize=8)
def _marking(tokenizer: Any) -> Any:
    from tokenizers import AddedToken

    marking = copy.deepcopy(tokenizer)
    marking.add_tokens([AddedToken(MARK, special=True, normalized=False)], special_tokens=True)
    return marking


@functools.lru_cache(maxsize=8)
def _patterns(
    tokenizer: Any, template: str
) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Return patterns of the first character of each special token and of each added token that the
    template names; and of each special token."""
    added = tokenizer.added_tokens_decoder.values()
    special = [str(token) for token in added if token.special]
    named = [str(token) for token in added if str(token).strip() and str(token) in template]
    return _pattern([*special, *named]), _pattern(special)


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    written = {text for text in texts if text.strip()}
    return re.compile(f"(?={_either(written)})(?s:.)") if written else None


def _either(texts: Iterable[str]) -> str:
    """Return the expression of one of these texts. It reads what several begin with once: tried one
    after the other, Llama 3's 256 special tokens take seconds for a hostile message, in which no
    other thread runs."""
    texts = sorted(texts)
    if "" in texts:  # the shortest one is enough
        return ""
    branches = [
        re.escape(first) + _either(text[1:] for text in group)
        for first, group in itertools.groupby(texts, key=lambda text: text[0])
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
