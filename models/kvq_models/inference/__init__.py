"""Prefill, decode steps and generation through a cache."""
