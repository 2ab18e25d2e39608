"""Waterfill: bits shared out over calibrated channels by reverse water-filling, of keys before RoPE
and of values in an eigenbasis."""

from kvq_jax.methods.waterfill.method import Waterfill

__all__ = ["Waterfill"]
