"""Programs on top of the library: the `kvq` command, evaluation through a cache, and reports.

Example:

    from kvq_tools import evaluate

Names are imported when they are first used, so that `kvq --help` does not wait for JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_tools.evaluation import Evaluation, evaluate, evaluate_caches, measure, tokenize

__all__ = ["Evaluation", "evaluate", "evaluate_caches", "measure", "tokenize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvq_tools import evaluation

    return getattr(evaluation, name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
