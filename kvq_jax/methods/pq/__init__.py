"""Product quantization: one code for each group of channels, an entry of a codebook that is learned
from a text."""

from kvq_jax.methods.pq.method import ProductQuantization

__all__ = ["ProductQuantization"]
