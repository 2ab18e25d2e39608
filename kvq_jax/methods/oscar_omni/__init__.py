"""OScaR, Omni-Scaled Canalized Rotation: rotated keys and values, keys divided by the size of their
token."""

from kvq_jax.methods.oscar_omni.method import OscarOmni

__all__ = ["OscarOmni"]
