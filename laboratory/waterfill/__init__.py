"""Variants of waterfill, read as the protocol reads a cache after a prompt, in one forward pass."""
