"""Studies for `python -m laboratory.run`: a module adds its arguments and returns its numbers."""
