"""OptR: rotations of keys and values that are learned for the least error after the layer's output
projection."""

from kvq_jax.methods.optr.method import OptR

__all__ = ["OptR"]
