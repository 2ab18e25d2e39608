"""XQuant and XQuant-CL: the layer's input is cached in place of its keys and values. See
README.md."""

from kvq_jax.methods.xquant.method import XQuant, XQuantCL

__all__ = ["XQuant", "XQuantCL"]
