"""Steps of an engine's slots, several in one call of a program: to pass a model and a cache to a
program takes milliseconds of Python, whatever the program does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import VACANT, Accepted
from kvq_models.inference.row_sampling import Drawn, row_rules
from kvq_models.llama.flat_llama import FlatLlama

# limit on one call of several steps: new requests wait for its end, and a stream's tokens come
# together
CALL_SECONDS = 0.1


def steps_of_call(slots: Iterable[Accepted | None], maximum: int, seconds: float) -> int:
    """Return the number of steps that the next call takes: at most `maximum`, no more than any
    request has tokens left, and as many as fit in CALL_SECONDS if one takes `seconds`. It is one
    step if a request's first token waits to be sent, or for penalties, which are counted from
    texts."""
    running = [one for one in slots if one is not None]
    if any(one.drawn == 1 for one in running):
        return 1
    if any(one.request.frequency_penalty or one.request.presence_penalty for one in running):
        return 1
    left = min(one.request.max_new_tokens - one.drawn for one in running)
    return max(1, min(maximum, left, int(CALL_SECONDS / seconds)))


def step(
    model: FlatLlama,
    cache: Cache,
    offsets: programs.Offsets,
    slots: Sequence[Accepted | None],
    count: int,
    implementation: Implementation,
) -> tuple[list[Drawn], Cache, programs.Offsets]:
    """Take `count` steps of all slots with a request. Return (what each step drew, the slots'
    cache, the offsets)."""
    drawn, cache, offsets = programs.step_slots(
        model,
        cache,
        offsets,
        np.array([one.last if one else 0 for one in slots], np.int32),
        np.array([one is not None for one in slots]),
        np.array([one.penalty if one else 0 for one in slots], np.float32),
        np.bool_(any(one is not None and one.request.biased for one in slots)),
        row_rules(one.rule if one else VACANT for one in slots),
        np.int32(count),
        implementation,
    )
    drawn = jax.tree.map(np.asarray, drawn)
    return [jax.tree.map(lambda a, i=i: a[i], drawn) for i in range(count)], cache, offsets
