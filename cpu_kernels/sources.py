"""The sources of the compiled library, and their hash. It imports no other file of this project:
setup.py runs it where JAX may be missing.
"""

from __future__ import annotations

import hashlib
import pathlib

FOLDER = pathlib.Path(__file__).parent / "csrc"


def sources(folder: pathlib.Path = FOLDER) -> list[pathlib.Path]:
    """Return the C++ files of a folder, none if it is missing. Other files, and hidden ones as
    editors leave them, do not count.
    """
    files = (*folder.glob("*.cc"), *folder.glob("*.h"))
    return sorted(file for file in files if file.is_file() and not file.name.startswith("."))


def digest(folder: pathlib.Path = FOLDER) -> str:
    """Return a hash of the sources. A library that was compiled from others is refused."""
    content = b"".join(file.read_bytes() for file in sources(folder))
    return hashlib.sha256(content).hexdigest()[:16]
