"""An extension of griffe, which reads docstrings for the documentation site: shapes are no links.

Markdown takes `rows["v"] [B, K, T, H]` for a link to a page called "B, K, T, H".
"""

import re

import griffe  # pyright: ignore[reportMissingImports]

CODE = re.compile(r"(`[^`]*`|^    .*$)", re.MULTILINE)


def without_links(text: str) -> str:
    """Escape the second of two neighbouring brackets, outside of code."""
    parts = CODE.split(text)
    parts[::2] = [re.sub(r"(\]\s?)\[", r"\1\\[", part) for part in parts[::2]]
    return "".join(parts)


class Shapes(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = without_links(obj.docstring.value)
