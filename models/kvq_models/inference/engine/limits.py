"""Sizes of an engine, and the step between them."""

from __future__ import annotations

SLOTS = 8  # requests at a time
MAX_SLOTS = 64  # the limit if memory decides
QUEUE_LIMIT = 64  # requests that may wait
CAPACITY_STEP = 64  # tokens by which capacities differ: each is a program to compile
