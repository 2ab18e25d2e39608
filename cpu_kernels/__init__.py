"""C++ kernels for CPUs: decode attention that reads the packed words of a cache's body, as custom
calls of XLA. Imports JAX only."""
