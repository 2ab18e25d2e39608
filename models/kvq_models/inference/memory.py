"""The dtype with which bytes of caches are counted."""

from __future__ import annotations

CACHE_DTYPE = (  # dtype of full-precision rows where bytes are counted, whatever the model's dtype
    "bfloat16"
)
