"""`kvq generate`: continue a prompt through a cache, and report what was done."""

from __future__ import annotations

import argparse
import dataclasses

from kvq_tools.cli import batch, inputs, one_generation
from kvq_tools.cli.console import UserError
from kvq_tools.cli.one_prompt import has_prompt


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to call `kvq generate`, with the options that not every mode takes.

    `why_not` ends the error about an option that this mode does not take.
    """

    name: str
    takes: frozenset[str]
    why_not: str


ONE = Mode("one prompt", frozenset({"stream", "draft", "mesh", "capacity"}), "give --prompts")
SAVED = Mode(
    "a saved prompt",
    frozenset({"stream", "draft"}),
    "kvq prefill has already made the cache of --from",
)
MANY = Mode(
    "many prompts", frozenset({"out", "slots", "memory", "capacity"}), "leave out --prompts"
)
MODES = (ONE, SAVED, MANY)


def run(options: argparse.Namespace) -> None:
    if options.stream and options.json:
        raise UserError(
            "--stream prints text as it comes, and --json one object at the end: leave out one of"
            " them"
        )
    mode = mode_of(options)
    for name in sorted(frozenset().union(*(each.takes for each in MODES)) - mode.takes):
        value = getattr(options, name)
        if value is not None and value is not False:  # --memory 0 is given, too
            allowed = " or ".join(each.name for each in MODES if name in each.takes)
            raise UserError(f"--{name} is for {allowed}: {mode.why_not}")
    if mode is MANY:
        if options.out is None:
            raise UserError("--prompts needs --out, the file for the answers")
        options.cache = options.cache or inputs.DENSE
        batch.run(options)
    else:
        one_generation.run(options)


def mode_of(options: argparse.Namespace) -> Mode:
    """Return the mode that the options choose. Raises UserError if they choose none or two."""
    if options.prompts is not None:
        if options.saved is not None:
            raise UserError("--from continues one saved prompt: leave out --prompts")
        return MANY
    if options.saved is not None:
        return SAVED
    if not has_prompt(options):
        raise UserError(
            "one of the arguments --prompt --prompt-file --prompt-ids --prompts --from is required"
        )
    return ONE
