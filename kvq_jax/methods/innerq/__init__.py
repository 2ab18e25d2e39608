"""InnerQ: both caches grouped over the inner dimension of their product, per-group symmetric or asymmetric, keys normalised per channel."""

from kvq_jax.methods.innerq.method import InnerQ

__all__ = ["InnerQ"]
