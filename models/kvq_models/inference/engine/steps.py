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
    running = [accepted for accepted in slots if accepted is not None]
    if any(accepted.drawn == 1 for accepted in running):
        return 1
    requests = [accepted.request for accepted in running]
    if any(request.frequency_penalty or request.presence_penalty for request in requests):
        return 1
    left = min(accepted.request.max_new_tokens - accepted.drawn for accepted in running)
    return max(1, min(maximum, left, int(CALL_SECONDS / seconds)))


def slot_inputs(slots: Sequence[Accepted | None]) -> programs.SlotInputs:
    """Return what a call takes from the slots, as NumPy arrays, so that nothing is compiled."""
    return programs.SlotInputs(
        tokens=np.array([accepted.last if accepted else 0 for accepted in slots], np.int32),
        active=np.array([accepted is not None for accepted in slots]),
        penalties=np.array([accepted.penalty if accepted else 0 for accepted in slots], np.float32),
        biased=np.array(
            any(accepted is not None and accepted.request.biased for accepted in slots)
        ),
        rules=row_rules(accepted.rule if accepted else VACANT for accepted in slots),
    )


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
        model, cache, offsets, slot_inputs(slots), np.int32(count), implementation
    )
    drawn = jax.tree.map(np.asarray, drawn)
    return [jax.tree.map(lambda a, i=i: a[i], drawn) for i in range(count)], cache, offsets
