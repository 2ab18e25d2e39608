"""Timings on a GPU, and the candidates that they compare."""
