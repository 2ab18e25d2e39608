"""Caches on several devices: the mesh axes that split the axes of their arrays, and a layer's
functions on each shard."""
