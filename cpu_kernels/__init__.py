"""C++ kernels for CPUs, as custom calls of XLA: attention in decode steps and prompts, products
with packed weights, and writes into a cache's body. Imports nothing else of this project.
"""
