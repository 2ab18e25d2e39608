"""KIVI: keys quantized per channel over groups of tokens, values per token over groups of
channels."""

from kvq_jax.methods.kivi.method import Kivi

__all__ = ["Kivi"]
