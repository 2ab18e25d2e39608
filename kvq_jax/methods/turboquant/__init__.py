"""TurboQuant: a random rotation, the norm of each vector, and levels that suit a coordinate of the
unit sphere."""

from kvq_jax.methods.turboquant.method import TurboQuant

__all__ = ["TurboQuant"]
