"""The steps of an engine's slots, of which one may be under way while the tokens of the one before
it are read: a step takes the tokens that were just drawn from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import VACANT, Accepted
from kvq_models.inference.row_sampling import Drawn, row_rules
from kvq_models.llama.flat_llama import FlatLlama

Slots = Sequence[Accepted | None]


class Step(NamedTuple):
    """A step that was begun: what it draws, on the device, and for whom."""

    drawn: Drawn
    slots: tuple[Accepted | None, ...]

    def serves(self, slot: int, accepted: Accepted | None) -> bool:
        """Return True if the step draws a token of this request, still in this slot."""
        return accepted is not None and self.slots[slot] is accepted


def begin_step(
    model: FlatLlama,
    cache: Cache,
    offsets: programs.Offsets,
    slots: Slots,
    before: Step | None,
    implementation: Implementation,
) -> tuple[Step | None, Cache, programs.Offsets]:
    """Begin a step of all slots whose request gets a token after that of the step `before`, which
    may be under way. Return (the step, the slots' cache, the offsets), or None for the step if no
    request gets one."""
    ahead = [int(before is not None and before.serves(i, one)) for i, one in enumerate(slots)]
    going = tuple(
        one if one is not None and one.drawn + more < one.request.max_new_tokens else None
        for one, more in zip(slots, ahead, strict=True)
    )
    if not any(going):
        return None, cache, offsets
    drawn, cache, offsets = programs.step_slots(
        model,
        cache,
        offsets,
        np.array([one.last if one else 0 for one in going], np.int32),
        np.zeros(len(slots), np.int32) if before is None else before.drawn.token,
        np.array(ahead, bool),
        np.array([one is not None for one in going]),
        np.array([one.penalty if one else 0 for one in going], np.float32),
        np.bool_(any(one is not None and one.request.biased for one in going)),
        row_rules(
            one.rule_after(more) if one else VACANT for one, more in zip(going, ahead, strict=True)
        ),
        implementation,
    )
    return Step(drawn, going), cache, offsets


def can_run_ahead(slots: Slots) -> bool:
    """Return True if a step needs no more of the one before than its tokens: penalties are counted
    from texts."""
    return not any(
        one is not None and (one.request.frequency_penalty or one.request.presence_penalty)
        for one in slots
    )
