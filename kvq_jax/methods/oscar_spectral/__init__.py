"""OSCAR, Offline Spectral Covariance-Aware Rotation: keys and values in a calibrated rotation of
each head, clipped, in uniform codes for each token."""

from kvq_jax.methods.oscar_spectral.method import OscarSpectral

__all__ = ["OscarSpectral"]
