"""Kernels on Mosaic GPU, the successor of Pallas' Triton route (route.py)."""
