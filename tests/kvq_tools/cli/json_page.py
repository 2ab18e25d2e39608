"""Read docs/json.md as the tests need it: a heading per format, and in its section every key in
code marks."""

import functools
import pathlib
import re
from typing import Any

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "json.md"
EVERYWHERE = "every object"


@functools.cache
def sections() -> dict[str, frozenset[str]]:
    """Return the keys in each section, by the names in its heading."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    keys = {
        head: frozenset(re.findall(r"`(\w+)`", text))
        for head, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {
        name: names
        for head, names in keys.items()
        for name in re.findall(r"[a-z][\w.-]*|every object", head)
    } | {EVERYWHERE: next(names for head, names in keys.items() if EVERYWHERE in head.lower())}


def undescribed_keys(result: dict[str, Any]) -> list[str]:
    """Return the keys of an object, and of the objects in its `caches`, that its section of the
    page does not name."""
    known = sections().get(result["format"], frozenset()) | sections()[EVERYWHERE]
    keys = [*result, *(key for cache in result.get("caches", ()) for key in cache)]
    return sorted({key for key in keys if key not in known})
