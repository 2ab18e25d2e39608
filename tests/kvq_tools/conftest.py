"""Types are checked while evaluations are tested, which pass most of the arrays of kvq_tools. The
other tests here run commands whole: what they call is checked by its own tests, and to check it
again would take a fifth of their time."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(scope="module", autouse=True)
def types_as_needed(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "evaluation" not in request.path.parts:
            patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield
