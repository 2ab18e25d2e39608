"""The first choice of a completion, and the answers of a separate engine like the server's."""

from collections.abc import Iterator
from typing import Any

import openai

from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import Event, Request, Token
from tests.kvq_tools.serving.running import NAME, PROMPT, Running


def first_choice(client: openai.OpenAI, **asked: Any) -> Any:
    """Return the first choice of a completion, greedy and of PROMPT unless asked otherwise."""
    defaults = {"model": NAME, "prompt": PROMPT, "temperature": 0}
    return client.completions.create(**defaults | asked).choices[0]


def alone(server: Running, text: str, new: int, special: bool = True, **asked) -> list[int]:
    """Return the tokens that a separate engine draws for a prompt, with or without the tokenizer's
    special tokens."""
    engine = server.engine()
    ids = tuple(server.tokenizer(text, add_special_tokens=special).input_ids)
    engine.submit(Request(ids, new, end_ids=tuple(server.llama.config.eos_token_ids), **asked))
    return [event.token for event in until_idle(engine) if isinstance(event, Token)]


def until_idle(engine: Engine) -> Iterator[Event]:
    while not engine.idle:
        yield from engine.advance()


def text_of(server: Running, text: str, tokens: list[int]) -> str:
    """Return the text of tokens that come after a text."""
    ids = server.tokenizer(text).input_ids
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, whole = (server.tokenizer.decode(i, **options) for i in (ids, [*ids, *tokens]))
    return whole.removeprefix(before)
