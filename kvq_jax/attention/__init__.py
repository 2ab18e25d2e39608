"""Attention over a layer's regions: the reference that defines it, and the streaming path that reads the body in chunks."""
