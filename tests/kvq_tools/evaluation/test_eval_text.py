"""How a text becomes windows and bytes: every token is scored once, with enough context, and every
byte belongs to one token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvq_jax.cache.spec import parse
from kvq_tools.evaluation import tokenize
from kvq_tools.evaluation.results import Evaluation
from kvq_tools.evaluation.settings import check_request
from kvq_tools.evaluation.windows import check_windows, windows
from laboratory.embedded_model.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer
from tests.kvq_models.checkpoints import tiny_config

CASES = [
    (tokens, window, stride)
    for tokens in (2, 7, 8, 9, 16, 40, 41)
    for window in (2, 3, 8)
    for stride in range(1, window + 1)
]


@pytest.mark.parametrize("prompt", [0, 1, 3])
def test_every_token_is_scored_once_and_after_enough_context(prompt):
    tried = 0
    for tokens, window, stride in CASES:
        if prompt and (prompt >= window - stride or prompt >= tokens):
            continue
        tried += 1
        scored = {}
        for begin, end, first in windows(tokens, window, stride, prompt):
            assert 1 <= first < end - begin <= window, (
                f"{tokens=} {window=} {stride=}: window {begin}-{end} scores from {first}"
            )
            for token in range(begin + first, end):
                assert token not in scored, (
                    f"{tokens=} {window=} {stride=}: token {token} is scored twice"
                )
                scored[token] = token - begin
        without_context = {
            token for token in range(tokens) if stride == window and token % window == 0
        }
        assert set(scored) == set(range(prompt + 1, tokens)) - without_context, (
            f"{tokens=} {window=} {stride=}"
        )
        short = [
            token
            for token, context in scored.items()
            if token >= window and context < max(window - stride, 1)
        ]
        assert not short, f"{tokens=} {window=} {stride=}: tokens {short} have too little context"
    assert tried > 20


WRONG = {
    "one token": (dict(tokens=1), "at least two tokens, and this one has 1"),
    "no token": (dict(tokens=0), "at least two tokens, and this one has 0"),
    "outside the vocabulary": (
        dict(tokens=97),
        "token id 96 at position 96 is outside the vocabulary of 96",
    ),
    "window of one": (dict(window=1), "predicts nothing"),
    "window beyond the positions": (dict(window=65), "65 tokens is beyond the 64 positions"),
    "stride over window": (dict(stride=17), "between 1 and the window of 16"),
    "no stride": (dict(stride=0), "between 1 and the window of 16"),
    "prompt of a window": (dict(prompt=15), "leaves nothing to score in windows of 16"),
    "prompt beyond the overlap": (dict(prompt=9), "into the 8 tokens that windows of 16 with a"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_scored_is_refused_in_one_line(case):
    changes, message = WRONG[case]
    sizes = {"tokens": 40, "window": 16, "stride": 8, "prompt": 0} | changes
    ids = np.arange(sizes.pop("tokens"))
    with pytest.raises(ValueError, match=message) as error:
        check_windows(tiny_config(), ids, **sizes)
    assert "\n" not in str(error.value)
    check_windows(tiny_config(), np.arange(40), 16, 8, prompt=8)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("tokens", [np.arange(40) + 0.5, ["1"] * 40, None])
def test_tokens_that_are_no_integers_are_not_rounded(tokens):
    with pytest.raises(ValueError, match="token_ids must be integers, got"):
        check_windows(tiny_config(), tokens, 16, 8)


@pytest.mark.usefixtures("types_unchecked")
def test_settings_that_are_no_sizes_or_unknown_are_refused_in_one_line():
    for choices, message in (
        ({"window": "16"}, "window='16' must be an integer of at least 0"),
        ({"stride": 8.0}, "stride=8.0 must be an integer of at least 0"),
        ({"windows": 16}, "no setting 'windows'; it has window, stride, mode"),
    ):
        with pytest.raises(ValueError, match=message):
            check_request(tiny_config(), np.arange(40), [], **choices)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["the cat and the dog"] * 3, 280), directory, 64)
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "text",
    [
        "the cat and the dog",
        "né à l'été, 日本語 😀!",
        "  two  spaces \n\n",
        f"one{END_OF_TEXT}two",
        "",
    ],
)
def test_the_bytes_of_all_tokens_are_those_of_the_text(tokenizer, text):
    found = tokenize(tokenizer, text)
    assert found.ids.tolist() == tokenizer(text).input_ids
    assert found.bytes is not None
    assert found.bytes.sum() == len(text.encode())
    assert found.bytes[0] == 0, "the token that opens a text stands for none of it"
    assert (found.bytes >= 0).all()


def evaluation(tokens: int, **changes: Any) -> Evaluation:
    """Return numbers of so many tokens, all 1 and at the positions of the tokens by default."""
    where, ones = np.arange(tokens), np.ones(tokens, np.float32)
    fields = {"spec": parse("dense"), "mode": "decode", "window": 8, "prompt": 0}
    fields |= {"index": where, "position": where, "exact_nats": ones, "nats": ones, "kl": ones}
    return Evaluation(**fields | {"agrees": where > 0, "utf8_bytes": None} | changes)


def test_numbers_by_position_add_up_to_those_of_the_text():
    rng = np.random.default_rng(0)
    position = rng.integers(1, 50, 200)
    arrays = {name: rng.random(200).astype(np.float32) for name in ("exact_nats", "nats", "kl")}
    agrees = rng.random(200) < 0.7
    found = evaluation(200, window=50, position=position, agrees=agrees, utf8_bytes=600, **arrays)
    for buckets in (1, 3, 8, 50, 99):
        parts = found.by_position(buckets)
        assert len(parts) <= buckets
        assert [p.first for p in parts] == [0, *(p.last + 1 for p in parts[:-1])]
        assert parts[-1].last == 49
        assert sum(p.tokens for p in parts) == 200
        assert sum(p.flips for p in parts) == found.flips.size
        for name, mean in (("nats", found.mean_nats), ("kl", found.mean_kl)):
            total = sum(p.tokens * getattr(p, name) for p in parts if p.tokens)
            assert total / 200 == pytest.approx(mean), f"{name} in {buckets} buckets"
    assert found.bits_per_byte == pytest.approx(arrays["nats"].sum() / np.log(2) / 600)
    assert found.perplexity == pytest.approx(np.exp(arrays["nats"].mean()))
    assert found.flips.tolist() == np.flatnonzero(~found.agrees).tolist()


@pytest.mark.parametrize(
    ("window", "position", "kl", "of_windows"),
    [
        # of 4 tokens by 2: the second scores two tokens, the last, which is short, one: less than
        # half of a full window
        (4, [1, 2, 3, 2, 3, 2], [1, 2, 3, 4, 6, 50], [2, 5]),
        # of 8 tokens by 2, which overlap by most of their tokens: the first scores seven tokens,
        # each other two
        (8, [*range(1, 8), *[6, 7] * 4], np.repeat([1, 2, 3, 4, 5], (7, 2, 2, 2, 2)), range(1, 6)),
    ],
    ids=["a short last window", "windows that overlap"],
)
def test_the_kl_of_a_window_is_the_mean_of_the_tokens_that_it_scores(
    window: int, position: list[int], kl: Sequence[int], of_windows: Sequence[int]
):
    index = np.arange(1, len(position) + 1)
    arrays = {"index": index, "position": np.array(position), "kl": np.asarray(kl, float)}
    found = evaluation(len(position), window=window, **arrays)
    assert found.window_kl == list(of_windows)


@pytest.mark.parametrize(
    ("name", "value"), [("exact_nats", np.nan), ("nats", np.inf), ("kl", -np.inf)]
)
def test_an_evaluation_is_finite_if_every_number_of_every_token_is(name: str, value: float):
    assert evaluation(4).finite
    broken = np.array([1, 1, value, 1], np.float32)
    assert not evaluation(4, **{name: broken}).finite, f"one {value} in {name} goes unnoticed"
