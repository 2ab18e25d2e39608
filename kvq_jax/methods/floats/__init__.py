"""Small floats that inference engines ship: fp8, mxfp4, nvfp4."""

from kvq_jax.methods.floats.method import FP8, MXFP4, NVFP4

__all__ = ["FP8", "MXFP4", "NVFP4"]
