"""Measure a cache by a model's predictions: the perplexity of a text, and the distance to the
full-precision model, token by token.

Example:

    from kvq_tools.evaluation import evaluate
    evaluation = evaluate(llama, "kivi:bits=2", token_ids, window=1024, mode="decode")
    evaluation.perplexity, evaluation.mean_kl, evaluation.agreement, evaluation.by_position()

Modules:

    settings.py  the settings of an evaluation, checked
    windows.py   cut a text into windows, and choose the tokens of each that are scored
    text.py      a text's tokens, and the UTF-8 bytes of each
    forward.py   the model without a cache: the full-precision reference, and the simulation that
                 papers use
    through.py   one cache in one of the three modes, a slice of positions at a time
    compare.py   two distributions: -log p, KL, top-1 agreement
    results.py   numbers of a text from the numbers of its tokens
    protocol.py  equal windows, two readings and intervals, to compare caches
    run.py       `evaluate`, `evaluate_caches`, `measure`, `measure_rows`
"""

from kvq_tools.evaluation.results import Bucket, Evaluation, Quality
from kvq_tools.evaluation.run import RowQuality, evaluate, evaluate_caches, measure, measure_rows
from kvq_tools.evaluation.text import TokenizedText, tokenize

__all__ = [
    "Bucket",
    "Evaluation",
    "Quality",
    "RowQuality",
    "TokenizedText",
    "evaluate",
    "evaluate_caches",
    "measure",
    "measure_rows",
    "tokenize",
]
