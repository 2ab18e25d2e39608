"""KVarN: rotated keys and values, with equal variance along tokens and channels before they are
rounded."""

from kvq_jax.methods.kvarn.method import KVarN

__all__ = ["KVarN"]
