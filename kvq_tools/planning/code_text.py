"""A text of another kind that is at hand everywhere: sources of Python's standard library.

They are others than the benchmarks measure on (benchmarks/protocol/code_text.py).
"""

from __future__ import annotations

import pathlib
import sysconfig

MODULES = (
    "calendar",
    "configparser",
    "csv",
    "email/message",
    "fractions",
    "gettext",
    "locale",
    "http/cookies",
    "mailbox",
    "shlex",
    "statistics",
    "tarfile",
)


def code_text() -> str | None:
    """Return the sources of MODULES, or None if this interpreter comes without sources."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [library / f"{module}.py" for module in MODULES]
    if not all(file.is_file() for file in files):
        return None
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
