"""Time generation: compile first, then time prefill and decoding separately. The tokens are those
of `kvq_models.generate`."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.stages import Lowered
from jaxtyping import Array, Int

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import LengthsB
from kvq_models.inference import decoding, generation, speculation
from kvq_models.inference.generation import Generated, GenerationSettings, GenerationState
from kvq_models.inference.prompts import lowered_prompt
from kvq_models.inference.sampling import Sampling
from kvq_models.inference.speculation import History
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama


class TimedGeneration:
    """The generation of one prompt. Creating it compiles ahead of time; iterating over `segments`
    runs it.

    `compile_seconds` covers tracing and compilation. `prefill_seconds` and `decode_seconds` are
    wall time until the device is done, without compilation. `steps` counts the model's steps so
    far.

    Args:
        known: tokens at the prompt's start that the cache already holds.
        logits: [1, V] after the prompt, if the cache holds all of it. There is no prefill then.
        drafts: most tokens that a step may draft (speculation.py), 0 for none.
        reading: a context that shows the prefill's progress.
    """

    def __init__(
        self,
        llama: Llama,
        cache: Cache,
        prompt: list[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        eos_ids: tuple[int, ...] = (),
        seed: int = 0,
        implementation: Implementation = None,
        known: int = 0,
        logits: Array | None = None,
        drafts: int = 0,
        reading: AbstractContextManager[None] | None = None,
    ):
        self._llama, self._cache, self._logits = llama, cache, logits
        self._model = FlatLlama(llama)
        new = [prompt[known:] or prompt[:1]]  # what the cache holds is not read again
        self._tokens, self._lengths = decoding.checked_tokens(
            llama, cache, new, None, new_tokens=max_new_tokens - (logits is not None)
        )
        self._settings = generation.generation_settings(
            max_new_tokens, sampling, eos_ids, jax.random.key(seed), implementation
        )
        self._drafts, self._history, self._reading = drafts, None, reading or nullcontext()
        if drafts:
            speculation.check(cache, drafts)
            whole = np.array([prompt], np.int32)
            self._history = speculation.begun_history(
                jnp.asarray(whole), jnp.array(whole.shape[1:], jnp.int32), max_new_tokens
            )
        self.max_new_tokens = max_new_tokens
        self.steps, self.prefill_seconds, self.decode_seconds = 0, 0.0, 0.0
        started = time.perf_counter()
        self._compile()
        self.compile_seconds = time.perf_counter() - started

    def _compile(self) -> None:
        how = self._settings, self._history, self._drafts
        if self._logits is None:
            compile_generation(self._llama, self._cache, self._tokens, self._lengths, *how)
        else:
            state = generation.begun(self._cache, self._logits, self.max_new_tokens)
            compile_steps(self._llama, state, *how)

    def _start(self) -> GenerationState:
        if self._logits is not None:
            return generation.begun(self._cache, self._logits, self.max_new_tokens)
        return generation.start(
            self._llama, self._cache, self._tokens, self._lengths, self._settings
        )

    def segments(self, steps: int, seconds: float = 0.0) -> Iterator[Generated]:
        """Yield all tokens so far after every `steps` new ones, or with `seconds` after `steps` and
        then after as many as take that long. The next segment consumes the cache of the previous
        one."""
        started = time.perf_counter()
        with self._reading:
            state = jax.block_until_ready(self._start())
        self.prefill_seconds = time.perf_counter() - started
        maximum, until = self.max_new_tokens, 0
        while until < maximum and not np.asarray(state.ended).all():
            before, until = until, min(until + steps, maximum)
            started = time.perf_counter()
            state = jax.block_until_ready(self._advance(state, jnp.int32(until)))
            took = time.perf_counter() - started
            self.decode_seconds += took
            if seconds:
                steps = max(1, int((until - before) * seconds / took))
            self.steps = int(state.step)
            yield generation.generated(state, maximum)

    def _advance(self, state: GenerationState, until: Array) -> GenerationState:
        if self._history is None:
            return generation.advance(self._model, state, self._settings, until)
        state, self._history = speculation.advance(
            self._model, state, self._history, self._settings, until, self._drafts
        )
        return state

    def run(self) -> Generated:
        """Run the whole generation and return it."""
        *_, last = self.segments(self.max_new_tokens)
        return last


def compile_generation(
    llama: Llama,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: LengthsB,
    settings: GenerationSettings,
    history: History | None = None,
    drafts: int = 0,
) -> None:
    """Compile the programs that `generation.start` and `generation.advance` run for these prompts,
    padded as by `checked_tokens`. Nothing is consumed.

    On one device the loop is compiled, or loaded, while the prompt's programs are traced: it
    takes longest, and XLA holds no lock of Python's.
    """
    placement = cache.placement
    if placement is not None:
        tokens, lengths = jax.device_put((tokens, lengths), placement.everywhere)
    logits = jax.ShapeDtypeStruct((cache.batch, llama.config.vocab_size), jnp.float32)
    reading = functools.partial(
        lowered_prompt, llama, cache, tokens, lengths, implementation=settings.implementation
    )
    begun = functools.partial(generation.begun, max_new_tokens=settings.max_new_tokens)
    state = jax.eval_shape(begun, cache, logits)
    if placement is not None:
        (program,) = reading()
        where, filled = program.compile().output_shardings
        state = _placed(state, [*jax.tree.leaves(filled), where], placement)
        compile_steps(llama, state, settings, history, drafts)
        return
    with ThreadPoolExecutor(1) as beside:
        steps = beside.submit(_lowered_steps(llama, state, settings, history, drafts).compile)
        for program in reading():
            program.compile()
        _begin_counters(state)
        steps.result()


def _placed(state: GenerationState, first: list[Sharding], placement: Placement) -> GenerationState:
    """Return a described state: its first arrays, cache and logits, get the given shardings, and
    its counters lie on every device."""
    leaves, tree = jax.tree.flatten(state)
    where = first + [placement.everywhere] * (len(leaves) - len(first))
    return tree.unflatten(
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to)
        for s, to in zip(leaves, where, strict=True)
    )


def compile_steps(
    llama: Llama,
    state: GenerationState,
    settings: GenerationSettings,
    history: History | None = None,
    drafts: int = 0,
) -> None:
    """Compile `generation.advance`, or `speculation.advance` if there is a history, for a state or
    its description. Nothing is consumed."""
    _lowered_steps(llama, state, settings, history, drafts).compile()
    _begin_counters(state)


def _lowered_steps(
    llama: Llama,
    state: GenerationState,
    settings: GenerationSettings,
    history: History | None,
    drafts: int,
) -> Lowered:
    model = FlatLlama(llama)
    if history is None:
        return generation.advance.lower(model, state, settings, jnp.int32(0))
    return speculation.advance.lower(model, state, history, settings, jnp.int32(0), drafts)


def _begin_counters(state: GenerationState) -> None:
    """Run the small program of `generation.begun` before the clock runs."""
    placement = state.cache.placement
    everywhere = None if placement is None else placement.everywhere
    generation.begun_counters(*state.tokens.shape, everywhere)
