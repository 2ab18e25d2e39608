"""How many requests an engine serves and holds, if nobody says otherwise."""

from __future__ import annotations

SLOTS, MOST_SLOTS = (
    8,
    64,
)  # requests at a time: by default, and at most if memory decides
QUEUE_LIMIT = 64  # requests that wait
