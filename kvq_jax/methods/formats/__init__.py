from kvq_jax.methods.formats.method import INT_METHODS, NORMAL_FLOAT_METHODS

__all__ = ["INT_METHODS", "NORMAL_FLOAT_METHODS"]
