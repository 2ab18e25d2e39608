"""Checkpoints as they are published quantized: one module per layout of tensors, all dequantized
when a weight is read."""
