"""Attention over a layer's regions: the reference that defines it, the streaming path that reads
the body in chunks, and the kernels for GPUs and CPUs."""
