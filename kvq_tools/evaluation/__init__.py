"""Measure a cache by a model's predictions: the perplexity of a text, and the distance to the
full-precision model, token by token.

Example:

    from kvq_tools.evaluation import evaluate
    evaluation = evaluate(llama, "kivi:bits=2", token_ids, window=1024, mode="decode")
    evaluation.perplexity, evaluation.mean_kl, evaluation.agreement, evaluation.by_position()

Modules:

    defaults.py  the settings of an evaluation that nobody chose
    settings.py  the settings of an evaluation, checked
    windows.py   cut a text into windows, and choose the tokens of each that are scored
    text.py      a text's tokens, and the UTF-8 bytes of each
    forward.py   the model without a cache: the full-precision reference, and the simulation that
                 papers use
    cache_run.py one cache in one of the three modes, a slice of positions at a time
    compare.py   two distributions: -log p, KL, top-1 agreement
    results.py   numbers of a text from the numbers of its tokens
    protocol.py  equal windows, two readings and intervals, to compare caches
    run.py       `evaluate`, `evaluate_caches`, `measure`, `measure_rows`

Names are imported when they are first used: help says defaults without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_tools.evaluation.results import Bucket, Evaluation, Quality
    from kvq_tools.evaluation.run import (
        RowQuality,
        evaluate,
        evaluate_caches,
        measure,
        measure_rows,
    )
    from kvq_tools.evaluation.text import TokenizedText, tokenize

_MODULES = {
    "Bucket": "results",
    "Evaluation": "results",
    "Quality": "results",
    "RowQuality": "run",
    "TokenizedText": "text",
    "evaluate": "run",
    "evaluate_caches": "run",
    "measure": "run",
    "measure_rows": "run",
    "tokenize": "text",
}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # later look-ups do not come here
    return value
