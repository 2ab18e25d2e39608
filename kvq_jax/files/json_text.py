"""Parse JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Return the value of a JSON text, made with `hooks` as by `json.loads`. Raises ValueError, for
    a text that is nested too deeply too."""
    try:
        return json.loads(text, **hooks)
    except RecursionError as error:
        raise ValueError(error) from None
