"""A request that the arrays of a step cannot hold is refused before it is accepted: it would stop
every other request."""

from typing import Any

import pytest

from kvq_models import Llama
from kvq_models.inference.engine.requests import MAX_SEED, Request, VocabularyError
from kvq_models.inference.row_sampling import MAX_ALTERNATIVES
from tests.kvq_models.inference.engine.test_engine import CAPACITY, VOCABULARY, answer, engine_of


def request_of(**fields: Any) -> Request:
    """Return a request whose fields have any types. Types are checked in tests alone, and only as
    an object is made."""
    request = Request((1, 2), 3)
    for name, value in fields.items():
        object.__setattr__(request, name, value)
    return request


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"choice": 2**31}, "choice=2147483648 must be an integer from 0 to 2147483647"),
        ({"choice": -1}, "choice=-1 must be an integer from 0 to"),
        ({"choice": 0.5}, "choice=0.5 must be an integer from 0 to"),
        ({"seed": 2**32}, "seed=4294967296 must be an integer from 0 to 4294967295"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"alternatives": MAX_ALTERNATIVES + 1}, "alternatives=21 must be an integer from 0 to 20"),
        ({"alternatives": 1.5}, "alternatives=1.5 must be an integer"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be an integer of at least 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be an integer"),
        ({"max_new_tokens": float("nan")}, "max_new_tokens=nan must be an integer"),
        ({"prompt": (1, 2.5)}, "the tokens of prompt and bias must be integers"),
        ({"bias": ((2.5, 1.0),)}, "the tokens of prompt and bias must be integers"),
        ({"bias": ((1, 1e39),)}, "must be finite, in float32 too"),
        ({"bias": ((1, 10**400),)}, "must be finite, in float32 too"),
        ({"bias": ((1, float("nan")),)}, "must be finite, in float32 too"),
        ({"frequency_penalty": -1e39}, "must be finite, in float32 too"),
        ({"presence_penalty": 1e39}, "must be finite, in float32 too"),
        ({"owner": "\ud800"}, "must be a text that UTF-8 can encode"),
    ],
)
def test_what_the_arrays_of_a_step_cannot_hold_is_refused_in_one_line(
    fields: dict[str, Any], told: str
):
    request = request_of(**fields)
    with pytest.raises(ValueError, match=told) as refused:
        request.check(VOCABULARY, CAPACITY)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**70])
@pytest.mark.parametrize("biased", [False, True])
def test_a_token_outside_the_vocabulary_is_named_as_such(token: int, biased: bool):
    request = request_of(bias=((token, 1.0),)) if biased else request_of(prompt=(1, token))
    with pytest.raises(VocabularyError, match="outside the model's vocabulary of 96") as refused:
        request.check(VOCABULARY, CAPACITY)
    assert refused.value.biased == biased


def test_the_largest_numbers_are_served(llama: Llama):
    request = Request(
        (1, VOCABULARY - 1),
        3,
        seed=MAX_SEED,
        choice=2**31 - 1,
        alternatives=MAX_ALTERNATIVES,
        bias=((7, 3.4e38),),
    )
    events = answer(engine_of(llama), request)
    assert [event[1] for event in events if event[0] == "Token"] == [7, 7, 7]
    assert events[-1] == ("Ended", "length")
