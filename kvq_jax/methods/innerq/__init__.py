"""InnerQ: groups over the inner dimension of each product, symmetric or asymmetric by group, and
keys normalized per channel."""

from kvq_jax.methods.innerq.method import InnerQ

__all__ = ["InnerQ"]
