"""`kvq lm-eval`: the command line of lm-evaluation-harness, with `kvq` among its models."""

from __future__ import annotations

import argparse
import sys

from kvq_tools.cli.console import NotFiniteError, UserError

MODEL = "kvq"


def run(options: argparse.Namespace) -> None:
    try:
        from kvq_tools.evaluation import lm_eval_model
    except ImportError as error:
        raise UserError(error) from error
    sys.argv = ["kvq lm-eval", *with_model(options.arguments)]
    try:
        lm_eval_model.cli_evaluate()
    except lm_eval_model.RefusedError as error:
        raise UserError(error) from error
    except FloatingPointError as error:
        raise NotFiniteError(error) from error
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        raise UserError(f"{error}; `kvq lm-eval ls tasks` lists all") from error


def with_model(arguments: list[str]) -> list[str]:
    """Return the command line with --model kvq, if it runs tasks and names no model."""
    named = any(
        argument in ("--model", "-M", "--help", "-h") or argument.startswith("--model=")
        for argument in arguments
    )
    runs = arguments[:1] == ["run"] or arguments[0].startswith("-")
    return [*arguments, "--model", MODEL] if runs and not named else arguments
