"""A conversation on one cache: each turn adds its tokens, and earlier turns are read from the
cache.

The cache, the ids of the tokens in it and the text that they spell change together, at the end of
each segment of a few generated tokens. An answer can be stopped there, so the cache holds exactly
what was shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference import generation
from kvq_models.inference.generation import STREAM_STEPS, GenerationSettings, GenerationState
from kvq_models.inference.padding import bucket, padded
from kvq_models.inference.sampling import Sampling
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama
from kvq_tools import chat_template
from kvq_tools.cli.console import UserError
from kvq_tools.cli.handover import SavedPrompt, can_shorten, shortened
from kvq_tools.cli.text_input import common_prefix, render_chat
from kvq_tools.cli.timed import compile_generation
from kvq_tools.growing_text import decoded

Finish = Literal["ended", "max-new-tokens", "full", "stopped"]


class CacheFull(UserError):
    """The cache has no room for the turn."""


@dataclasses.dataclass(frozen=True)
class ChatTurn:
    """The effect of a message on the cache: the first `kept` tokens stay, and `tokens` come after
    them. Together they spell `text`, which is `messages` in the chat template."""

    messages: tuple[dict[str, str], ...]
    kept: int
    tokens: list[int]
    text: str


@dataclasses.dataclass(frozen=True)
class AnswerSettings:
    """The settings of every answer."""

    max_new_tokens: int
    sampling: Sampling
    seed: int
    implementation: Implementation


class Conversation:
    """A conversation. `cache` holds the tokens `ids`, `finish` says why the last answer ended, and
    `finite` whether the logits of all answers were finite.

    Args:
        new_cache: returns the cache at the start: empty, or holding the tokens of `saved`.
        saved: the prompt of `kvq prefill` from which the conversation goes on.
    """

    def __init__(
        self,
        llama: Llama,
        tokenizer: Any,
        new_cache: Callable[[], Cache],
        settings: AnswerSettings,
        system: str | None = None,
        saved: SavedPrompt | None = None,
    ) -> None:
        self._llama, self._model = llama, FlatLlama(llama)
        self._tokenizer = tokenizer
        self._new_cache = new_cache
        self._settings = settings
        self._opening: tuple[dict[str, str], ...] = (
            () if system is None else ({"role": "system", "content": system},)
        )
        self._saved = saved
        self._compiled: set[tuple[int, int]] = set()
        self._answers = 0
        self.finish: Finish = "ended"
        self.finite = True
        self.cache = new_cache()
        self._forget()

    def reset(self) -> None:
        """Forget everything that was said."""
        self.cache = self._new_cache()
        self._forget()

    def _forget(self) -> None:
        self.messages = self._opening
        self.ids: list[int] = list(self._saved.prompt) if self._saved else []
        self._text: str | None = None  # the text of the tokens, if it is known

    def turn(self, message: str) -> ChatTurn:
        """Return what a message will add, without changing anything.

        The conversation is rendered as a whole. Normally its tokens begin with those in the cache.
        If the tokenizer would split an answer differently from the model, its text still begins
        with theirs. Some templates rewrite earlier turns (they strip spaces, or drop an answer's
        reasoning): then only the tokens before the first difference are kept. If a sliding window
        has left tokens that those need, the turn begins with a new cache and reads them again.

        Raises CacheFull if no room is left for an answer, and UserError if the template fails.
        """
        messages = (*self.messages, {"role": "user", "content": message})
        text, ids = self._encoded(messages)
        kept = len(self.ids)
        if ids[:kept] == self.ids:
            new = ids[kept:]
        elif self._text is not None and text.startswith(self._text):
            new = chat_template.encoded(self._tokenizer, text[len(self._text) :])
        else:
            kept = self._kept(common_prefix(self.ids, ids[:-1]))
            new = ids[kept:]
        if self._saved is not None and not kept:
            raise UserError("this tokenizer reads another token at the start of the saved text")
        if not new:
            raise UserError("the chat template adds nothing for this message")
        if kept + len(new) >= self.cache.capacity:
            raise CacheFull(
                f"the cache has {self.cache.capacity} tokens, of which {kept} are in use, and this"
                f" message takes {len(new)}: /reset starts a new conversation, --capacity"
                f"{' of kvq prefill' if self._saved else ''} makes room for longer ones"
            )
        return ChatTurn(messages, kept, new, text)

    def _encoded(self, messages: tuple[dict[str, str], ...]) -> tuple[str, list[int]]:
        if self._saved is None or self._saved.opening is None:
            text = render_chat(self._tokenizer, list(messages))
            return text, chat_template.encoded(self._tokenizer, text)
        text = self._saved.opening.in_chat(self._tokenizer, messages)
        return text, self._saved.opening.encoded(self._tokenizer, text)

    @property
    def begun(self) -> bool:
        """True after the first answer since the start."""
        return self._text is not None

    def needs_compiling(self, turn: ChatTurn) -> bool:
        """Return True if `prepare` has to compile programs for this turn: for the first one, for
        longer ones, and near the cache's end."""
        return self._shape(turn) not in self._compiled

    def prepare(self, turn: ChatTurn) -> None:
        """Compile the programs that will answer a turn."""
        lengths = np.array([len(turn.tokens)], np.int32)
        tokens = jnp.asarray(
            padded(np.array([turn.tokens], np.int32), lengths, self.cache.capacity)
        )
        compile_generation(
            self._llama, self.cache, tokens, jnp.asarray(lengths), self._generation(turn)
        )
        self._compiled.add(self._shape(turn))

    def answer(
        self, turn: ChatTurn, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[list[int]]:
        """Add a turn's tokens, generate the answer, and yield its tokens so far after each segment.

        `stopped` is called between segments. After each segment the conversation holds what was
        yielded, including an end-of-turn token.
        """
        settings = self._generation(turn)
        if turn.kept < len(self.ids):
            self._shorten(turn.kept)
        self._answers += 1
        before = [*self.ids, *turn.tokens]
        state = generation.start(self._llama, self.cache, [turn.tokens], None, settings)
        answer = self._hold(state, turn, before)
        while not (self._ended(answer) or len(answer) == settings.max_new_tokens or stopped()):
            until = jnp.int32(min(len(answer) + STREAM_STEPS, settings.max_new_tokens))
            state = generation.advance(self._model, state, settings, until)
            answer = self._hold(state, turn, before)
            yield answer
        if self._ended(answer):
            self.finish = "ended"
        elif len(answer) == self._settings.max_new_tokens:
            self.finish = "max-new-tokens"
        else:
            self.finish = "full" if len(answer) == settings.max_new_tokens else "stopped"

    def _hold(self, state: GenerationState, turn: ChatTurn, before: list[int]) -> list[int]:
        """Take over the cache after a segment, with its tokens and text, and return the answer's
        tokens."""
        answer = np.asarray(state.tokens)[0, : int(state.lengths[0])].tolist()
        content = decoded(self._tokenizer, answer[:-1] if self._ended(answer) else answer)
        self.cache, self.ids = state.cache, before + answer
        self.finite &= bool(state.finite[0])
        self._text = turn.text + decoded(self._tokenizer, answer, special=True)
        self.messages = (*turn.messages, {"role": "assistant", "content": content})
        return answer

    @property
    def _first(self) -> int:
        """The number of tokens in a new cache."""
        return 0 if self._saved is None else len(self._saved.prompt)

    def _kept(self, common: int) -> int:
        """Return how many of the first `common` tokens the cache can keep."""
        if can_shorten(self.cache, common):
            return common
        if common < self._first:
            raise UserError(
                f"this message changes token {common} of the {self._first} in the file, and sliding"
                " windows have left what comes before it: kvq prefill reads another text"
            )
        return self._first

    def _shorten(self, kept: int) -> None:
        if kept and can_shorten(self.cache, kept):
            self.cache = shortened(self._llama, self.cache, kept)
        else:
            self.cache = self._new_cache()
        self.ids = self.ids[:kept]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._llama.config.eos_token_ids

    def _ended(self, answer: list[int]) -> bool:
        return bool(answer) and answer[-1] in self.end_ids

    def _budget(self, turn: ChatTurn) -> int:
        """Return the most tokens that the answer may have."""
        return min(
            self._settings.max_new_tokens, self.cache.capacity - turn.kept - len(turn.tokens)
        )

    def _generation(self, turn: ChatTurn) -> GenerationSettings:
        choices, key = self._settings, jax.random.key(self._settings.seed)
        return generation.generation_settings(
            self._budget(turn),
            choices.sampling,
            self.end_ids,
            jax.random.fold_in(key, self._answers),
            choices.implementation,
        )

    def _shape(self, turn: ChatTurn) -> tuple[int, int]:
        return bucket(len(turn.tokens)), bucket(self._budget(turn))
