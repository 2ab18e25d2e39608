"""The text of the domain `code`."""

from __future__ import annotations

import hashlib

from kvq_tools.planning import code_text as sources

# of Python 3.11 and 3.12, byte for byte
CODE_SHA256 = "e34ad4e479efe72b8e20f2ea77d25dd0115363ede1ae71544b10fd786a0c9d25"


def code_text() -> str:
    """Return sources of Python's standard library that are the same in every installation of the
    supported versions. Raises ValueError if this interpreter's are not."""
    text = sources.code_text()
    if text is not None and hashlib.sha256(text.encode()).hexdigest() == CODE_SHA256:
        return text
    raise ValueError(
        "this Python's standard library is not the one of Python 3.11 and 3.12, which is the text"
        " of the domain `code`: run one of these, or give --text code=FILE"
    )
