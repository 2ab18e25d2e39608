"""Growing text equals the text of all tokens, stops are found wherever they are, and the cost of a
token does not grow with the answer, whatever the tokens and the stops."""

import json
import time
from collections.abc import Callable

import openai.types as api
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_models import EMBEDDED
from kvq_models.inference.engine.requests import Ended, PromptRead, Reason, Request, Token
from kvq_models.llama.checkpoint import open_checkpoint
from kvq_tools.cli.continuation import Continuation
from kvq_tools.growing_text import CONTEXT, GrowingText, text_by_token
from kvq_tools.serving.answer import Answer, AnswerPiece, TokenInText
from kvq_tools.serving.text import Stops, TokenTexts, token_bytes, token_text
from kvq_tools.serving.wire import ChatWire, CompletionWire, Usage

TOKENIZER = open_checkpoint(EMBEDDED, "tokenizer").tokenizer()
SPECIAL = TOKENIZER.convert_tokens_to_ids(TOKENIZER.all_special_tokens[0])
CONTINUATION = TOKENIZER.convert_tokens_to_ids("\u0122")  # the byte 0x80, never a character alone


def grown(tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    text = GrowingText(tokenizer, prompt)
    return [*(text.add(token) for token in tokens), text.rest()]


@given(st.text(max_size=40), st.integers(0, 10))
def test_pieces_are_together_the_text(text: str, cut: int):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    prompt, tokens = ids[:cut], ids[cut:]
    before = TOKENIZER.decode(prompt, clean_up_tokenization_spaces=False)
    if "\ufffd" not in text:  # else the prompt may end inside a character, which they complete
        before = before.rstrip("\ufffd")
    pieces = grown(TOKENIZER, prompt, tokens)
    assert before + "".join(pieces) == TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == Continuation(TOKENIZER, prompt).text(tokens)
    assert not any(piece.endswith("\ufffd") and "\ufffd" not in text for piece in pieces), (
        "half a character was shown"
    )


def test_a_character_of_several_tokens_before_one_that_the_prompt_begins_is_not_sent_again():
    ids = TOKENIZER("\U0001f600\U0001f600 \u65e5\u672c", add_special_tokens=False).input_ids
    for cut in range(len(ids)):
        pieces = grown(TOKENIZER, ids[:cut], ids[cut:])
        assert "".join(pieces) == Continuation(TOKENIZER, ids[:cut]).text(ids[cut:]), cut


@given(st.lists(st.integers(0, 2047), max_size=30))
def test_pieces_of_any_tokens_are_their_text(tokens: list[int]):
    assert "".join(grown(TOKENIZER, [], tokens)) == TOKENIZER.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_a_tokenizer_that_drops_a_space_at_the_start_loses_none_between_pieces():
    class Words:
        """As SentencePiece's: each token begins with a space, which a text does not."""

        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(f" w{i}" for i in ids).removeprefix(" ")

    assert grown(Words(), [1], [2, 3, 4]) == [" w2", " w3", " w4", ""]


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_a_text_ends_before_its_first_stop(text: str, stops: list[str], size: int):
    """A stop is found as soon as its last character is there. Of two, the one that ends first wins,
    then the one that begins first."""
    found, stopped, holder = "", False, Stops(tuple(stops))
    for at in range(0, len(text), size):
        certain, stopped = holder.add(text[at : at + size])
        found += certain
        seen = text[: at + size]
        begins = [seen.find(stop) for stop in stops if stop in seen]
        assert stopped == bool(begins)
        if stopped:
            assert found == seen[: min(begins)]
            return
        assert text.startswith(found)
    assert found + holder.rest() == text


@pytest.mark.parametrize(("text", "shown"), [("abcab", "abc"), ("abcx", "abcx"), ("ab", "")])
def test_what_may_begin_a_stop_is_held_back(text: str, shown: str):
    assert Stops(("abd",)).add(text) == (shown, False)


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

    word = TOKENIZER(" a", add_special_tokens=False)["input_ids"][0]
    assert TOKENIZER.unk_token_id != CONTINUATION
    assert decoded(word) < 300 * 5 * CONTEXT, "every token decodes the whole answer again"
    assert decoded(token) < 5 * decoded(word)


@pytest.mark.parametrize("scored", [False, True])
def test_a_prompt_is_sent_back_without_a_token_being_decoded_again(scored: bool):
    """The engine's thread makes the piece, and every client would wait for it."""
    text = "It is \U0001f600 and more"
    ids = tuple(TOKENIZER(text, add_special_tokens=False).input_ids)
    parts, counted = text_by_token(TOKENIZER, ids), Counted()
    assert len(parts) == len(ids)
    answer = Answer(0, Request(ids, 9), counted, (), parts, lambda piece: None)
    counted.decoded = 0
    scores = (tuple(-float(i) for i in range(len(ids))), ((),) * len(ids)) if scored else ((), ())
    piece = answer.take(PromptRead(0, *scores))
    assert counted.decoded == 0
    assert piece is not None
    assert piece.text == text
    ends = [*(token.offset for token in piece.tokens[1:]), len(text)]
    assert [text[token.offset : end] for token, end in zip(piece.tokens, ends, strict=False)] == (
        list(parts) if scored else []
    )


@pytest.mark.parametrize("reason", ["ended", "length"])
def test_a_last_token_without_text_comes_with_the_end(reason: Reason):
    answer = Answer(0, Request((5,), 9), TOKENIZER, (), None, lambda piece: None)
    assert answer.take(Token(0, SPECIAL, -1.0)) is None
    piece = answer.take(Ended(0, reason))
    assert piece is not None
    assert [token.token for token in piece.tokens] == [SPECIAL]


def test_tokens_that_wait_for_their_text_are_sent_in_linear_time():
    answer = Answer(0, Request((5,), 9000), TOKENIZER, (), None, lambda piece: None)
    started = time.process_time()
    for _ in range(8000):
        assert answer.take(Token(0, SPECIAL, -1.0)) is None
    word = TOKENIZER(" word", add_special_tokens=False)["input_ids"][0]
    piece = answer.take(Token(0, word, -1.0))
    assert time.process_time() - started < 3
    assert piece is not None
    assert len(piece.tokens) == 8001


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


def reported(choices: int, tokens: int) -> list[list[AnswerPiece]]:
    """Return pieces of answers with twenty alternatives for each token."""
    likely = tuple((10 + i, -2.0 - i) for i in range(20))

    def piece(index: int, at: int) -> AnswerPiece:
        token = TokenInText(5 + at % 50, -1.0, likely, at)
        return AnswerPiece(index, "x", (token,), "length" if at == tokens - 1 else None)

    return [[piece(index, at) for at in range(tokens)] for index in range(choices)]


@pytest.mark.parametrize("chat", [True, False])
def test_a_whole_answer_decodes_a_token_once_and_is_one_of_openais(chat: bool):
    decoded = []

    class Counting:
        def decode(self, ids: list[int], **options: object) -> str:
            decoded.append(ids)
            return TOKENIZER.decode(ids, **options)

    texts = TokenTexts(Counting())
    wire = ChatWire("m", texts, True) if chat else CompletionWire("m", texts, 5)
    answer = wire.whole(reported(2, 100), Usage(3, 200, 1))
    assert len(decoded) <= 2 * 70, "tokens are decoded again for each place"
    kind = api.chat.ChatCompletion if chat else api.Completion
    read = kind.model_validate_json(answer, strict=True)
    assert read.model_dump(exclude_unset=True) == json.loads(answer)
    logprobs = read.choices[1].logprobs
    assert len(logprobs.content if chat else logprobs.tokens) == 100
    assert read.usage.total_tokens == 203


def test_a_chunk_has_what_a_whole_answer_has():
    pieces = reported(1, 3)
    for wire, of in (
        (ChatWire("m", TokenTexts(TOKENIZER), True), "content"),
        (CompletionWire("m", TokenTexts(TOKENIZER), 5), "tokens"),
    ):
        whole = json.loads(wire.whole(pieces, Usage(3, 3)))["choices"][0]["logprobs"][of]
        chunks = [json.loads(json.dumps(wire.chunk(piece))) for piece in pieces[0]]
        assert [chunk["choices"][0]["logprobs"][of] for chunk in chunks] == [[one] for one in whole]
