"""C++ kernels for CPUs: decode attention over the packed words of a cache's body, as custom calls
of XLA. Imports only JAX.
"""
