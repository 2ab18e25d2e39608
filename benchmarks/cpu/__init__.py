"""Timings on a CPU."""
