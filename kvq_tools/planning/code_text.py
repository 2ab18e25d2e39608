"""A text of another kind that is at hand everywhere: sources of Python's standard library."""

from __future__ import annotations

import pathlib
import sysconfig

MODULES = (
    "difflib",
    "xml/dom/minidom",
    "optparse",
    "heapq",
    "weakref",
    "textwrap",
    "tracemalloc",
    "json/encoder",
    "cmd",
    "modulefinder",
    "concurrent/futures/_base",
    "pickletools",
)


def code_text() -> str | None:
    """Return the sources of MODULES, or None if this interpreter comes without sources."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [library / f"{module}.py" for module in MODULES]
    if not all(file.is_file() for file in files):
        return None
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
