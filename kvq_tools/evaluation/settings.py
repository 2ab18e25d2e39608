"""Settings of an evaluation: the windows, the mode, and the sizes of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

import kvq_jax as kvq
from kvq_jax.cache.cache import has_prompt_statistics, layout
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import integer
from kvq_models.llama.config import LlamaConfig
from kvq_tools.evaluation.defaults import BATCH, CHUNK, MAX_WINDOW, MODES, PROMPT, STEP, Mode
from kvq_tools.evaluation.windows import check_windows


class Settings(NamedTuple):
    """The settings of one evaluation, complete and checked (`check_request`).

    window   tokens of a window; each window starts with an empty cache
    stride   from the start of one window to the next
    mode     see cache_run.py
    batch    windows that run together; the results do not depend on it
    chunk    tokens of one `prefill` in mode `chunked`
    prompt   tokens of each window that mode `decode` prefills first. It scores neither them nor
             the next one
    step     tokens of one step of `decode`; the results of a correct cache do not depend on it
    """

    window: int
    stride: int
    mode: Mode = "decode"
    batch: int = BATCH
    chunk: int = CHUNK
    prompt: int = 0
    step: int = STEP

    def stated(self) -> dict[str, Any]:
        """Return the settings by name, with None for those that the mode does not use."""
        unused = {"chunked": ("step",), "decode": ("chunk",), "fake": ("chunk", "step")}[self.mode]
        return self._asdict() | dict.fromkeys(unused)

    def read_tokens(self, window: int) -> int:
        """Return the number of tokens in the cache when a window reads it for the last time."""
        return (window - 1) // self.chunk * self.chunk if self.mode == "chunked" else window - 1

    def quantized_tokens(self, cache: kvq.cache.Cache) -> int:
        """Return how many of these are quantized, in windows of the cache's capacity. In mode
        `fake` all of them are."""
        newest = self.read_tokens(cache.capacity)
        if self.mode == "fake":
            return newest if any(plan.quantizes for plan in cache.plans) else 0
        return kvq.size.quantized_tokens(cache, newest)


class Choices(TypedDict, total=False):
    """The settings that a caller chooses, by name. None and missing ones get their defaults."""

    window: int | None
    stride: int | None
    mode: Mode
    batch: int
    chunk: int
    prompt: int | None
    step: int


def check_request(
    config: LlamaConfig, token_ids: Integers, specs: Sequence[CacheSpec], **choices: Unpack[Choices]
) -> Settings:
    """Return complete settings, checked as far as that needs no weights. Raises as
    `evaluate_caches` does."""
    known = ", ".join(Choices.__annotations__)
    for name, value in choices.items():
        if name not in Choices.__annotations__:
            raise ValueError(f"an evaluation has no setting {name!r}; it has {known}")
        if name != "mode" and value is not None and integer(value, 0) is None:
            raise ValueError(f"{name}={value!r} must be an integer of at least 0")
    window, stride, prompt = choices.get("window"), choices.get("stride"), choices.get("prompt")
    window = min(MAX_WINDOW, config.positions) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    mode, step = choices.get("mode", "decode"), choices.get("step", STEP)
    batch, chunk = choices.get("batch", BATCH), choices.get("chunk", CHUNK)
    check_steps(mode, batch, chunk, step)
    if prompt and mode != "decode":
        raise ValueError(
            f"a prompt of {prompt} tokens is for mode 'decode': 'chunked' prefills everything,"
            " 'fake' nothing"
        )
    check_windows(config, token_ids, window, stride, prompt or 0)
    for spec in specs:
        layout(spec, config, 1, window)
    if mode == "decode":
        default = default_prompt(np.asarray(token_ids).size, window, stride)
        prompt = prompt_for(config, specs, prompt, default)
    return Settings(window, stride, mode, batch, chunk, prompt or 0, step)


def check_steps(mode: str, batch: int, chunk: int, step: int) -> None:
    """Raise ValueError, in one line, if there is no such mode or a size is not positive."""
    if mode not in MODES:
        raise ValueError(f"{mode=} must be one of {', '.join(MODES)}")
    if min(batch, chunk, step) < 1:
        raise ValueError(f"batch, chunk and step must be at least 1: {batch=}, {chunk=}, {step=}")


def default_prompt(tokens: int, window: int, stride: int) -> int:
    """Return the default length of a prompt: at most PROMPT, at most the overlap of windows, and at
    most half of a single window."""
    return min(PROMPT, window - stride if tokens > window else tokens // 2)


def prompt_for(
    config: LlamaConfig, specs: Sequence[CacheSpec], asked: int | None, default: int
) -> int:
    """Return the prompt length for all of these caches: `asked`, else `default` if one of the
    caches takes statistics from a prompt, else 0. Raise ValueError if one does and would get no
    prompt."""
    needing = [str(spec) for spec in specs if has_prompt_statistics(spec, config)]
    if asked is None and not needing:
        return 0
    used = default if asked is None else asked
    if needing and not used:
        remedy = (
            "give one of at least 1 token"
            if asked == 0
            else "let windows overlap: give a stride below the window"
        )
        raise ValueError(
            f"{needing[0]!r} takes statistics from a prompt, and a prompt of 0 tokens leaves it"
            f" without them; {remedy}"
        )
    return used
