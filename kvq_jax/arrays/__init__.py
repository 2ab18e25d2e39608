"""Stored arrays: packed codes with their scales, codebooks, polar pairs, sparse outliers;
quantizing into them and reading them back."""
