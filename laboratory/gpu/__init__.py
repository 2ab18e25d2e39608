"""The papers' own measurements of time, for a GPU."""
