"""The names of models in commands and reports, without the folders of a machine."""

from __future__ import annotations

import argparse
import pathlib

from kvq_models.named_models.names import EMBEDDED_NAME


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=EMBEDDED_NAME,
        help="a directory, a GGUF file, a Hub id, embedded or smollm2",
    )


def shown(model: str) -> str:
    """Return the name of a model for a report."""
    return "the embedded Llama" if model == EMBEDDED_NAME else pathlib.Path(model).name


def model_words(model: str) -> list[str]:
    """Return the words of a command for a model, or none for the embedded one, which is the
    default."""
    return [] if model == EMBEDDED_NAME else [f"--model {pathlib.Path(model).name}"]
