"""Parse JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, for one that is nested too deeply too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(error) from None
