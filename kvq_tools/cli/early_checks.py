"""Refuse what cannot work before JAX is imported: a model that is missing or not supported, and a
text that is not there. The command checks the rest."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvq_tools.cli.console import input_errors

TEXTS = ("prompt_file", "text")  # options that name a file to read, or - for stdin


def check(options: argparse.Namespace) -> None:
    """Raise UserError as the command itself would. Nothing is looked up on a network."""
    with input_errors():
        for name in TEXTS:
            path = getattr(options, name, None)
            if isinstance(path, str) and path != "-":
                Path(path).open("rb").close()
        if isinstance(model := getattr(options, "model", None), str):
            # imported late: 0.2 s
            from kvq_models.llama.hf_directory import is_hub_id
            from kvq_models.llama.open_checkpoint import read_config

            if Path(model).exists() or not is_hub_id(model):
                read_config(model)
