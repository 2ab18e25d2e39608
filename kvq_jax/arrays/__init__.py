"""Stored arrays (packed codes with their scales, codebooks, polar pairs, sparse outliers), and
functions that quantize into them and read them back."""
