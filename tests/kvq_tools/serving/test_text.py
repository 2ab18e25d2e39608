"""Growing text equals the text of all tokens, and stops are found wherever they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_models import EMBEDDED
from kvq_models.llama.checkpoint import open_checkpoint
from kvq_tools.cli.continuation import Continuation
from kvq_tools.growing_text import GrowingText
from kvq_tools.serving.text import Stops

TOKENIZER = open_checkpoint(EMBEDDED, "tokenizer").tokenizer()


def grown(tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    text = GrowingText(tokenizer, prompt)
    return [*(text.add(token) for token in tokens), text.rest()]


@given(st.text(max_size=40), st.integers(0, 10))
def test_pieces_are_together_the_text(text: str, cut: int):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    prompt, tokens = ids[:cut], ids[cut:]
    before = TOKENIZER.decode(prompt, clean_up_tokenization_spaces=False)
    if before.endswith("\ufffd"):  # the prompt ends inside a character
        return
    pieces = grown(TOKENIZER, prompt, tokens)
    assert "".join(pieces) == Continuation(TOKENIZER, prompt).text(tokens)
    assert not any(piece.endswith("\ufffd") and "\ufffd" not in text for piece in pieces), (
        "half a character was shown"
    )


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
