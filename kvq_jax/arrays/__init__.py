"""Stored arrays: packed codes with their scales, codebooks, polar pairs, sparse outliers; how they are made and read back."""
