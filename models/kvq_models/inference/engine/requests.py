"""Requests to an engine, and the events of their life."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from typing import Literal, TypeAlias

import numpy as np

from kvq_jax.types.integers import INT32, integer
from kvq_models.inference.row_sampling import MAX_ALTERNATIVES
from kvq_models.inference.sampling import Sampling

MAX_SEED = 2**32 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)  # what is larger becomes inf
MAX_BIASED = 300  # tokens with a bias

Ticket: TypeAlias = int  # names an accepted request
# tokens and their log-probabilities, the most probable first
Likely: TypeAlias = tuple[tuple[int, float], ...]
Reason: TypeAlias = Literal["ended", "length", "cancelled", "not-finite", "failed", "damaged"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: 0 if only the prompt's log-probabilities are wanted.
        sampling: the rule by which tokens are drawn.
        seed: with `choice`, the stream of random numbers: row `choice` of `generate` with
            key(seed).
        choice: see `seed`.
        end_ids: tokens that end the text, and are its last.
        alternatives: number of most probable tokens to report with each token.
        logprobs: the log-probabilities of drawn tokens matter. An answer that sent one from damaged
            memory ends with an error, even if its tokens are right.
        prompt_logprobs: report the log-probabilities of the prompt's tokens too.
        frequency_penalty: subtracted from a token's logit for each time it was drawn.
        presence_penalty: subtracted once from the logit of every token that was drawn.
        bias: (token, value to add to its logit). Log-probabilities stay the model's.
        owner: prompts of different owners share no prefixes.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    choice: int = 0
    end_ids: tuple[int, ...] = ()
    alternatives: int = 0
    logprobs: bool = True
    prompt_logprobs: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    owner: str = ""

    @property
    def biased(self) -> bool:
        """True if tokens are not drawn from the model's own distribution."""
        return bool(self.bias or self.frequency_penalty or self.presence_penalty)

    def check(self, vocab_size: int, capacity: int) -> None:
        """Raise ValueError, in one line, if the request does not fit the model, a cache of this
        capacity, or the arrays of a step, which all requests share."""
        self.sampling.check()
        if not self.prompt:
            raise ValueError("the prompt is empty; give at least one token")
        self._check_integers()
        need = len(self.prompt) + self.max_new_tokens
        if need > capacity:
            raise CapacityError(len(self.prompt), self.max_new_tokens, capacity)
        for biased, tokens in ((False, self.prompt), (True, self._biased_tokens)):
            if outside := [token for token in tokens if not 0 <= token < vocab_size]:
                raise VocabularyError(outside[0], vocab_size, biased)
        numbers = (
            self.frequency_penalty,
            self.presence_penalty,
            *(value for _, value in self.bias),
        )
        if len(self.bias) > MAX_BIASED or not all(abs(number) <= MAX_FLOAT32 for number in numbers):
            raise ValueError(
                f"penalties and biases must be finite, in float32 too, and at most {MAX_BIASED}"
                " tokens biased"
            )
        if any("\ud800" <= character <= "\udfff" for character in self.owner):
            raise ValueError(f"owner={self.owner!r} must be a text that UTF-8 can encode")

    @property
    def _biased_tokens(self) -> list[int]:
        return [token for token, _ in self.bias]

    def _check_integers(self) -> None:
        limits = {
            "max_new_tokens": None,  # the capacity limits it
            "seed": MAX_SEED,
            "choice": int(INT32.max),
            "alternatives": MAX_ALTERNATIVES,
        }
        for name, maximum in limits.items():
            value = getattr(self, name)
            number = integer(value, 0)
            if number is None or (maximum is not None and number > maximum):
                allowed = "of at least 0" if maximum is None else f"from 0 to {maximum}"
                raise ValueError(f"{name}={reprlib.repr(value)} must be an integer {allowed}")
        try:
            list(map(operator.index, (*self.prompt, *self._biased_tokens)))
        except TypeError:
            raise ValueError("the tokens of prompt and bias must be integers") from None


class CapacityError(ValueError):
    """A request needs more tokens than a row of the cache can hold."""

    def __init__(self, prompt: int, new: int, capacity: int):
        super().__init__(
            f"{prompt} prompt + {new} new tokens are {prompt + new}, and a row of the cache holds"
            f" {capacity}"
        )
        self.prompt, self.new, self.capacity = prompt, new, capacity


class VocabularyError(ValueError):
    """A token of the prompt, or one that is biased, is none of the model's."""

    def __init__(self, token: int, vocab_size: int, biased: bool):
        super().__init__(f"token id {token} is outside the model's vocabulary of {vocab_size}")
        self.biased = biased


class QueueFullError(RuntimeError):
    """The queue is full. Try again later."""

    def __init__(self, waiting: int, limit: int):
        super().__init__(f"{waiting} requests are waiting, and the queue holds {limit}")
        self.waiting, self.limit = waiting, limit


@dataclasses.dataclass(frozen=True)
class PromptRead:
    """The prompt is in the cache, and all that was computed of it is finite.

    Args:
        logprobs: of a request with `prompt_logprobs`, log p of each token given those before it (0
            for the first).
        likely: the most probable tokens there.
        stored: tokens of the prompt that came from the store of prefixes instead of being read.
            Events that differ in this alone are equal, because its bits are the same.
    """

    ticket: Ticket
    logprobs: tuple[float, ...] = ()
    likely: tuple[Likely, ...] = ()
    stored: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class Token:
    """A request has its next token."""

    ticket: Ticket
    token: int
    logprob: float
    likely: Likely = ()


@dataclasses.dataclass(frozen=True)
class Ended:
    """A request has ended, and its slot is vacant: by an end token, at its limit, by `cancel`, or
    because the model computed nan or inf, its program cannot be compiled, or its cache was damaged:
    at every attempt, or in a token that was sent."""

    ticket: Ticket
    reason: Reason


Event: TypeAlias = PromptRead | Token | Ended
