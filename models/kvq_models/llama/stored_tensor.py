"""A tensor as the header of a checkpoint's file describes it, and the error for every file that
cannot be loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

# Names of files for numbers of 16 bits that can stay packed, and their dtypes.
NUMBERS = {"BF16": "bfloat16", "F16": "float16"}


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message is one line with the file or tensor and the
    reason."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The header of a tensor: its file, its shape in Hugging Face's orientation, the file's name
    for its type, and the name under which the file stores it if that differs (a tensor that two
    weights share)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    stored_as: str | None = None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def lfs_pointer(path: Path) -> str:
    """Return what to do about a pointer that Git LFS left in a file's place, or ""."""
    try:
        with path.open("rb") as file:
            beginning = file.read(64)
    except OSError:
        return ""
    pointer = beginning.startswith(b"version https://git-lfs")
    return "it is a pointer of Git LFS; `git lfs pull` fetches the file" if pointer else ""
