"""Quantization methods, a folder for each: its options, its codec, and a README with the equations,
the source and every deviation."""
