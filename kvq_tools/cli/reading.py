"""The progress of a prompt, which one program reads as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvq_jax.attention.dispatch import prompts_attended
from kvq_tools.cli.console import progress


@contextmanager
def reading(tokens: int, layers: int) -> Iterator[None]:
    """Show that a model of this many layers reads a prompt. The share that is read so far is known
    if the CPU kernels attend to it: they count its layers, which all cost the same."""
    before = prompts_attended()

    def share() -> float:
        return (prompts_attended() - before) / layers

    with progress("reading the prompt", tokens, share):
        yield
