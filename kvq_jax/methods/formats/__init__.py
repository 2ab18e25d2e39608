"""Plain number formats without calibration: int2 to int8, and nf2 to nf4."""

from kvq_jax.methods.formats.method import TokenFormat

__all__ = ["TokenFormat"]
