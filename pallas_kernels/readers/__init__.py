"""Readers: how a kernel turns one tile of a stored format into scores or weighted values."""
