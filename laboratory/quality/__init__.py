"""Papers' claims about predictions, measured through the real cache."""
