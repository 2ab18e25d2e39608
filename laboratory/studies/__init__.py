"""Studies for `python -m laboratory.run`: each module adds its arguments and returns its numbers."""
