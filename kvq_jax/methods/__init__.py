"""Quantization methods, a folder for each: its options, its codec, and a README with the equations,
the source and every deviation."""

from kvq_jax.methods.registry import METHODS, register

__all__ = ["METHODS", "register"]
