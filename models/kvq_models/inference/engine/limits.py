"""Requests that an engine serves and holds by default."""

from __future__ import annotations

SLOTS = 8  # requests at a time
MOST_SLOTS = 64  # if memory decides
QUEUE_LIMIT = 64  # requests that wait
