"""KVQuant: calibrated non-uniform levels, keys before RoPE, exact outliers."""

from kvq_jax.methods.kvquant.method import KVQuant

__all__ = ["KVQuant"]
