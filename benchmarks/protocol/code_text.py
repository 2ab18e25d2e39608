"""The text of the domain `code`."""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig

# of Python 3.11 and 3.12, byte for byte
CODE_MODULES = (
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
CODE_SHA256 = "e34ad4e479efe72b8e20f2ea77d25dd0115363ede1ae71544b10fd786a0c9d25"


def code_text() -> str:
    """Return sources of Python's standard library that are the same in every installation of the
    supported versions. Raises ValueError if this interpreter's are not."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [library / f"{module}.py" for module in CODE_MODULES]
    if all(file.is_file() for file in files):
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        if hashlib.sha256(text.encode()).hexdigest() == CODE_SHA256:
            return text
    raise ValueError(
        "this Python's standard library is not the one of Python 3.11 and 3.12, which is the text"
        " of the domain `code`: run one of these, or give --text code=FILE"
    )
