"""Append records to a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO


def append(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """Add a record as one line at the file's end. It is on disk when this returns.

    Raises OSError with the file's name, and leaves the file as it was, if there is no room.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        # past the buffer: what it keeps after an error would be written when the file is closed
        _write(file.fileno(), json.dumps(record, ensure_ascii=False).encode() + b"\n")
        os.fsync(file.fileno())
    except OSError as error:
        os.ftruncate(file.fileno(), end)
        raise OSError(error.errno, error.strerror, file.name) from None


def _write(handle: int, line: bytes) -> None:
    while line:
        line = line[os.write(handle, line) :]
