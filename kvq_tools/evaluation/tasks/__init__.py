"""Tasks that a model answers by generating through its cache: pass keys and RULER's.
docs/evaluation.md runs others with lm-eval.

Modules:

    sample.py   a task, its samples and its files
    runner.py   generate the answers
    filler.py   fill a prompt up to its length
    passkey.py  samples and scores of `kvq passkey`
    niah.py     samples and scores of `kvq niah`
    ruler.py    samples of `kvq ruler`
    words.json  the English words of needles' keys and of lists
"""
