"""Cases that run in every suite, and those that run with --exhaustive alone: variants of the
others, for tests that compile much."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`; those that are not `usual` run with
    --exhaustive alone, and on GPUs. A tuple has a value for each of several names."""
    cases = list(cases)
    missing = [case for case in usual if case not in cases]
    assert not missing, f"{missing} are not cases"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*value, marks=() if case in usual else pytest.mark.exhaustive)
        for case, value in zip(cases, values, strict=True)
    ]
