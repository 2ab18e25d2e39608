"""PolarQuant: keys as angle and radius of each RoPE pair."""

from kvq_jax.methods.polarquant.method import PolarQuant

__all__ = ["PolarQuant"]
