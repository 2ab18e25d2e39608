"""GEAR: uniform codes, a low-rank approximation of their error, and sparse outliers."""

from kvq_jax.methods.gear.method import Gear

__all__ = ["Gear"]
