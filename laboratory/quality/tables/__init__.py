"""The papers' tables, in the papers' layout.

Perplexity and KL replace the scores of tasks that a small model cannot do. Groups and windows have
the papers' widths if the model's heads allow it. If the methods of a suite differ in bytes at those
settings, the suite also has a table at equal stored bits.
"""
