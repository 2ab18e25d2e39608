"""Run a text through a cache in one of three modes, a slice of positions at a time.

    decode    token after token through the cache, as generation reads it. The truth. A step of
              several tokens equals as many single steps and is quicker; fused GPU kernels serve
              single steps.
    chunked   `prefill` of one chunk after the other: exact inside a chunk, the prefix through the
              cache. Servers treat prompts this way.
    fake      one forward pass in which every token is quantized (forward.py), as KVQuant and XQuant
              simulate their perplexities.

Every mode walks over the same slices of positions, and all caches walk together: the full-precision
logits of a slice are computed once, compared with each cache's, and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.cache.cache import init_cache
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import LengthsB, ValidBT
from kvq_models.inference import layer_by_layer
from kvq_models.inference.prompts import read_prompt
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_tools.evaluation.compare import Terms, compare, token_nats
from kvq_tools.evaluation.defaults import CHUNK
from kvq_tools.evaluation.forward import hidden_states
from kvq_tools.evaluation.settings import Settings

# bytes of a slice's full-precision logits, fp32; one cache's logits take as many
SLICE_BYTES = 1 << 28


class Slice(NamedTuple):
    """Inputs start .. stop - 1 of every window, which predict the tokens after `first` .. stop - 1.
    `prompt` is prefilled in any mode."""

    start: int
    stop: int
    first: int
    prompt: bool = False


def slices(settings: Settings, length: int, batch: int, vocabulary: int) -> tuple[Slice, ...]:
    """Cut a window of `length` tokens into slices. The last slice may reach past the window. All
    but the prompt are equally long."""
    prompt, step = settings.prompt, settings.step
    if settings.mode == "chunked":
        size = min(settings.chunk, length)
    else:
        fitting = min(CHUNK, SLICE_BYTES // (4 * batch * vocabulary))
        size = min(max(1, fitting // step), -(-(length - prompt) // step)) * step
    parts = [Slice(0, prompt, prompt - 1, True)] if prompt else []
    return (*parts, *(Slice(at, at + size, at) for at in range(prompt, length - 1, size)))


class WindowBatch(NamedTuple):
    """Windows of a text as rows: tokens [B, T], right-padded past the last slice, lengths [B], and
    the positions of a window (width)."""

    tokens: Int[Array, "B T"]
    lengths: LengthsB
    width: int

    def inputs(self, part: Slice) -> Int[Array, "B t"]:
        return self.tokens[:, part.start : part.stop]

    def following(self, part: Slice) -> Int[Array, "B t"]:
        return self.tokens[:, part.first + 1 : part.stop + 1]


class Reference:
    """The full-precision model on a batch: (logits, -log p of the following tokens) of a slice.
    hidden: its last outputs, if they are known."""

    def __init__(self, llama: Llama, batch: WindowBatch, hidden: HiddenBTD | None = None):
        self.llama, self.batch = llama, batch
        if hidden is None:
            hidden = hidden_states(llama, batch.tokens[:, : batch.width], batch.lengths)
        self.hidden = hidden

    def __call__(self, part: Slice) -> tuple[Float[Array, "B t V"], Float[Array, "B t"]]:
        return _exact(self.llama, _rows(self.hidden, part), self.batch.following(part))


class CacheRun:
    """One cache on a batch. Each call returns the terms of a slice. Slices must come in order, a
    prompt by `read_only`."""

    def __init__(
        self,
        llama: Llama,
        spec: CacheSpec,
        settings: Settings,
        batch: WindowBatch,
        placement: Placement | None = None,
    ):
        self.llama, self.mode, self.batch, self.step = llama, settings.mode, batch, settings.step
        if settings.mode == "fake":
            self.hidden = hidden_states(llama, batch.tokens[:, : batch.width], batch.lengths, spec)
        else:
            rows = batch.tokens.shape[0]
            self.cache = init_cache(
                spec, llama.config, rows, batch.width, llama.embed[...].dtype, placement
            )

    def __call__(self, part: Slice, exact: Float[Array, "B t V"]) -> Terms:
        now, following = self.batch.inputs(part), self.batch.following(part)
        if self.mode == "fake":
            return _headed(self.llama, _rows(self.hidden, part), following, exact)
        if self.mode == "decode":
            steps = [
                self._decode(at, now, exact, following) for at in range(0, now.shape[1], self.step)
            ]
            return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *steps)
        new = jnp.clip(self.batch.lengths - part.start, 0, now.shape[1])
        logits, self.cache = read_prompt(self.llama, self.cache, now, new, all_logits=True)
        return _compared(logits, exact, following)

    def _decode(self, at: int, *arrays: Array) -> Terms:
        """Return the terms of one step from token `at` of a slice on. arrays: the slice's inputs,
        full-precision logits and following tokens."""
        now, exact, following = (
            jax.lax.dynamic_slice_in_dim(array, at, self.step, axis=1) for array in arrays
        )
        hidden, stored = self._step(now)
        return _decoded(self.llama, hidden, stored, exact, following)

    def _step(self, now: Int[Array, "B t"]) -> tuple[HiddenBTD, ValidBT]:
        """Decode one step's tokens. Return the last layer's output and a mask of stored tokens."""
        lengths = jnp.full(now.shape[:1], now.shape[1])
        hidden, stored, self.cache = layer_by_layer.decode(self.llama, self.cache, now, lengths)
        return hidden, stored

    def read(self, part: Slice) -> None:
        """Decode a slice without its logits."""
        now = self.batch.inputs(part)
        for at in range(0, now.shape[1], self.step):
            self._step(now[:, at : at + self.step])


def read_only(runs: Sequence[CacheRun], part: Slice) -> None:
    """Read a slice in mode `decode` through all caches without scoring it. Prompts are prefilled
    into all of them with one shared forward pass."""
    if not part.prompt:
        for run in runs:
            run.read(part)
        return
    _, caches = layer_by_layer.prefill_together(
        [run.llama for run in runs], [run.cache for run in runs], runs[0].batch.inputs(part)
    )
    for run, cache in zip(runs, caches, strict=True):
        run.cache = cache


def _rows(hidden: HiddenBTD, part: Slice) -> Float[Array, "B t D"]:
    """Return the slice's rows, with zeros past the window, where nothing is scored."""
    rows = hidden[:, part.first : part.stop]
    return jnp.pad(rows, ((0, 0), (0, part.stop - part.first - rows.shape[1]), (0, 0)))


@jax.jit
def _exact(
    llama: Llama, hidden: HiddenBTD, following: Int[Array, "B t"]
) -> tuple[Float[Array, "B t V"], Float[Array, "B t"]]:
    logits = llama.logits(hidden)
    return logits, token_nats(logits, following)


@jax.jit
def _headed(
    llama: Llama, hidden: HiddenBTD, following: Int[Array, "B t"], exact: Float[Array, "B t V"]
) -> Terms:
    return compare(llama.logits(hidden), exact, following)


@jax.jit
def _decoded(
    llama: Llama,
    hidden: HiddenBTD,
    stored: ValidBT,
    exact: Float[Array, "B t V"],
    following: Int[Array, "B t"],
) -> Terms:
    """Return the terms of a step. They are nan past the capacity, where nothing was stored."""
    return compare(jnp.where(stored[..., None], llama.logits(hidden), jnp.nan), exact, following)


_compared = jax.jit(compare)
