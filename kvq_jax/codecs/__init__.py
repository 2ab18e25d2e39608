"""Codecs, which turn the rows of one side of one layer into stored arrays, and read them for
attention."""
