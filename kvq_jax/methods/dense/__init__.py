"""The cache in full precision: rows in the model's dtype. It is the baseline, and skipped layers
use it."""

from kvq_jax.methods.dense.method import Dense, DenseCodec

__all__ = ["Dense", "DenseCodec"]
