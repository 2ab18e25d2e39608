"""The cost of a token's text does not grow with the answer, whatever the tokens and the stops."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvq_models import EMBEDDED
from kvq_models.inference.engine.requests import Request, Token
from kvq_models.llama.checkpoint import open_checkpoint
from kvq_tools.growing_text import GrowingText
from kvq_tools.serving.answer import Answer, AnswerPiece
from kvq_tools.serving.text import Stops, token_bytes, token_text

TOKENIZER = open_checkpoint(EMBEDDED, "tokenizer").tokenizer()
SPECIAL = TOKENIZER.convert_tokens_to_ids(TOKENIZER.all_special_tokens[0])
CONTINUATION = TOKENIZER.convert_tokens_to_ids("\u0122")  # the byte 0x80, never a character alone


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.decoded += len(ids)
        return TOKENIZER.decode(ids, **options)


@pytest.mark.parametrize("token", [SPECIAL, CONTINUATION], ids=["special", "no character"])
def test_tokens_without_text_cost_no_more_than_others(token: int):
    def decoded(token: int) -> int:
        counted = Counted()
        text = GrowingText(counted, TOKENIZER("It is")["input_ids"])
        for _ in range(300):
            text.add(token)
        return counted.decoded

    assert TOKENIZER.unk_token_id != CONTINUATION
    assert decoded(token) < 5 * decoded(TOKENIZER(" a", add_special_tokens=False)["input_ids"][0])


def test_tokens_that_wait_for_their_text_are_sent_in_linear_time():
    sent: list[AnswerPiece] = []
    answer = Answer(0, Request((5,), 9000), TOKENIZER, (), False, sent.append)
    started = time.process_time()
    for _ in range(8000):
        answer.take(Token(0, SPECIAL, -1.0))
    answer.take(Token(0, TOKENIZER(" word", add_special_tokens=False)["input_ids"][0], -1.0))
    assert time.process_time() - started < 3
    assert sum(len(piece.tokens) for piece in sent) == 8001


@pytest.mark.parametrize("grow", [lambda n: "q" * n, lambda n: "q" * (n - 1) + "x"])
def test_a_stop_costs_what_is_held_back(grow: Callable[[int], str]):
    stops = Stops((grow(1_000_000),))
    started = time.process_time()
    for _ in range(200):
        stops.add("a q")
    assert time.process_time() - started < 0.5


def test_parts_of_characters_have_bytes():
    ids = TOKENIZER("日本 é 🙂 a", add_special_tokens=False)["input_ids"]
    assert any("\ufffd" in token_text(TOKENIZER, token) for token in ids), "no part of a character"
    parts = [token_bytes(TOKENIZER, token) for token in ids]
    assert b"".join(part for part in parts if part is not None).decode() == "日本 é 🙂 a"


def test_byte_tokens_and_unknown_tokens():
    class Fallback:
        def decode(self, ids: list[int], **_: object) -> str:
            return "\ufffd"

        def convert_ids_to_tokens(self, token: int) -> str:
            return ["<0xE6>", "no bytes: \u4e00"][token]

    assert (token_bytes(Fallback(), 0), token_bytes(Fallback(), 1)) == (b"\xe6", None)
