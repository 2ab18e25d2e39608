"""Files that are replaced completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder to write to, and move it over `path` at the end.

    After an error the temporary file is removed, and `path` is as it was. The file gets the default mode of files that the process creates.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors writes files that only their owner may read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
