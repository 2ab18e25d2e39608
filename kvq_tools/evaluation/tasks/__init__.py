"""Tasks that a model answers by generating through its cache: pass keys, needles, GSM8K, LongBench.

sample.py says what a task is, runner.py runs one; every task has a file that makes samples and scores answers.
"""
