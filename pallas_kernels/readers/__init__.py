"""Readers turn one tile of a stored format into scores or weighted values inside a kernel."""
