"""A tensor as the header of a checkpoint's file describes it, and the error for every file that
cannot be loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one line and says which file or tensor,
    and why."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The file that holds a tensor, its shape in Hugging Face's orientation, the file's name for
    its type, and the name under which the file holds it where that is another one: a tensor that
    two weights share."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    stored_as: str | None = None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
