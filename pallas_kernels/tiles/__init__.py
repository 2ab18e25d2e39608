"""Tiles of packed words: their layout, their unpacking, and arithmetic on pairs."""
