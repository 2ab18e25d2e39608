"""Programs on top of the library: the `kvq` command, evaluation through a cache, and reports.

Example:

    from kvq_tools import evaluate

Names are imported when they are first used, so that `kvq --help` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_tools.evaluation.results import Evaluation
    from kvq_tools.evaluation.run import evaluate, evaluate_caches, measure
    from kvq_tools.evaluation.text import tokenize

_MODULES = {
    "Evaluation": "evaluation.results",
    "evaluate": "evaluation.run",
    "evaluate_caches": "evaluation.run",
    "measure": "evaluation.run",
    "tokenize": "evaluation.text",
}

__all__ = ["Evaluation", "evaluate", "evaluate_caches", "measure", "tokenize"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # later look-ups do not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
