"""Cases that run in every suite, and those that run with --exhaustive alone: variants of the others, for tests that compile much."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`; those that are not `usual` run with --exhaustive alone, and on GPUs."""
    cases = list(cases)
    missing = [case for case in usual if case not in cases]
    assert not missing, f"{missing} are no cases"
    return [case if case in usual else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]
