"""KVQuant: a calibrated non-uniform codebook, keys before RoPE, outliers in full precision."""

from kvq_jax.methods.kvquant.method import KVQuant

__all__ = ["KVQuant"]
