"""Pictures of tests are small: drawing and packing their pixels is most of a page's time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvq_tools.report import drawing


@pytest.fixture(scope="module", autouse=True)
def _small_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "DPI", 40)
        yield
