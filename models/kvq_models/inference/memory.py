"""The dtype with which bytes of caches are counted."""

from __future__ import annotations

# dtype of full-precision rows when bytes are counted, whatever the model's dtype
CACHE_DTYPE = "bfloat16"
