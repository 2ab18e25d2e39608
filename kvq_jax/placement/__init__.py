"""Caches on several devices: which mesh axes split which axes of their arrays, and a layer's
functions run on each shard."""
