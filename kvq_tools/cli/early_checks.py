"""Refuse a model that is not supported before JAX is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvq_tools.cli.console import input_errors


def check(options: argparse.Namespace) -> None:
    """Raise UserError as the command itself would. Nothing is looked up on a network."""
    model = getattr(options, "model", None)
    if not isinstance(model, str) or not Path(model).exists():
        return
    from kvq_models.llama.open_checkpoint import read_config  # imported late: 0.2 s

    with input_errors():
        read_config(model)
