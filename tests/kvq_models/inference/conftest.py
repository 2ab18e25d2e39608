"""What the tests of inference share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Every compilation while the test runs."""
    found: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
