"""Decode attention over packed words, as one split-K kernel and as stand-alone matrix-vector
products.
"""
