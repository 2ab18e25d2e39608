"""ZipCache: tokens to which a prompt's probes attend most get more bits than the others."""

from kvq_jax.methods.zipcache.method import ZipCache

__all__ = ["ZipCache"]
