"""Codecs: how the rows of one side of one layer become stored arrays, and how attention reads
them."""
