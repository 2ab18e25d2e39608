"""int2 to int8 and nf2 to nf4: number formats without calibration."""

from kvq_jax.methods.formats.method import TokenFormat

__all__ = ["TokenFormat"]
