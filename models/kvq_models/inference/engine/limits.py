"""Sizes of an engine, and the step between them."""

from __future__ import annotations

SLOTS = 8  # requests at a time
MAX_SLOTS = 64  # the limit if memory decides
QUEUE_LIMIT = 64  # requests that may wait
# how often a request whose memory was damaged is computed: one that is damaged again and again
# would hold up all others, since it begins before them
MAX_ATTEMPTS = 3
CAPACITY_STEP = 64  # tokens by which capacities differ: each is a program to compile
