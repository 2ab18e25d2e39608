"""The exact cache: rows in the model's dtype. The baseline, and what skipped layers use."""

from kvq_jax.methods.dense.method import Dense, DenseCodec

__all__ = ["Dense", "DenseCodec"]
