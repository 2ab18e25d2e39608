"""The papers' tables, in the papers' layout, and comparisons at equal bytes.

Perplexity and KL stand where some papers have the score of a task that a small model cannot do.
Widths of groups and windows are those of the papers, where the model's heads allow it; every suite
whose methods differ in bytes at those settings has a table at equal stored bits as well.
"""
