"""Compare a body before and after blocks were written into it."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def misplaced_rows(
    before: Any, after: Any, blocks: Any, starts: Sequence[int], leaving: Sequence[Any], axis: int
) -> list[int]:
    """Return the rows of the batch that differ from `before` with the row's block written in.

    Args:
        before: an array of a body.
        after: the same array after the step.
        blocks: the new entries, [B, ..., block entries, ...].
        starts: where a row's block begins, in entries of the axis of tokens.
        leaving: true if the row's block leaves. Otherwise the row must not change.
        axis: the axis of tokens.
    """
    before, after, blocks = (np.moveaxis(np.asarray(a), axis, 1) for a in (before, after, blocks))
    expected = before.copy()
    for b, start in enumerate(starts):
        if leaving[b]:
            expected[b, start : start + blocks.shape[1]] = blocks[b]
    # compared as numbers: of 0 and -0 either may be the smaller
    return [b for b in range(len(starts)) if not np.array_equal(after[b], expected[b])]
