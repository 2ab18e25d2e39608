"""The entry point of `kvq`: find the command, run it, and turn errors into one line and an exit
code.

A command is a module of `kvq_tools.cli.commands` with `configure(parser)`, which declares its
arguments and help, and `run(options)`. It needs one line in COMMANDS. Only the module of the
command in use is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from kvq_tools.cli import interruption
from kvq_tools.cli.console import NotFiniteError, UserError, print_json, printable

BAD_INPUT, NOT_FINITE = 2, 3

COMMANDS = {
    "demo": "generate and measure with several caches on the embedded model, and print a table",
    "fetch": "bring a public model into the cache folder, where its name stands for it",
    "chat": "talk with a model: several turns on one cache",
    "generate": "continue a prompt through a cache",
    "prefill": "read a prompt and write its cache to a file, with which generate goes on",
    "serve": "serve a model to many clients at a time, with OpenAI's API",
    "eval": "compare caches on a text: perplexity, KL, top-1 agreement, size",
    "report": (
        "write one self-contained page with pictures: quality, size, speed and errors of several"
        " caches"
    ),
    "passkey": "ask for a number that a long text states once",
    "niah": "ask for needles in a haystack, as RULER hides them",
    "ruler": "ask for variables and frequent words, as RULER does",
    "lm-eval": "pass a command line to lm-evaluation-harness, which then has kvq among its models",
    "memory": "count the exact bytes of a cache, from config.json alone",
    "calibrate": "make the parameters that a cache needs, from a model and a text",
    "plan": (
        "find the best cache for a budget of bits or bytes, measured on a text or from a"
        " calibration"
    ),
    "quantize-weights": "write a checkpoint whose weights have few different values",
    "methods": "list the cache methods with their options, defaults and sources",
    "doctor": "tell layer by layer what a cache will do to a model, and warn of what may go wrong",
}

PASSED_ON = ("lm-eval",)  # commands whose arguments are another program's
WITHOUT_PROGRAMS = ("fetch", "memory", "methods")  # commands that compile nothing

DESCRIPTION = """\
KV-cache quantization for JAX: runs Hugging Face Llama-family checkpoints with a cache that is 2 to 7 times smaller than bf16."""

EPILOG = """\
start here:
  kvq demo                                          everything on the small embedded model, no download
  kvq methods                                       what can stand after --cache
  kvq generate embedded --prompt "It was" --cache kivi:bits=2 --max-new-tokens 40
  kvq fetch smollm2                                 a public model of 135 million parameters, for MODEL in every command

Every command explains itself: kvq COMMAND --help. With --json, a command prints one JSON object and nothing else on stdout, errors too."""


class _Parser(argparse.ArgumentParser):
    """argparse, but a bad command line is an error like any other: one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


class _Version(argparse.Action):
    """argparse's own action would import kvq_jax, and with it JAX, for every command's help."""

    def __call__(self, *_: object) -> NoReturn:
        from kvq_jax import __version__

        print(f"kvq {__version__}")
        raise SystemExit(0)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands; only `command` has its arguments."""
    parser = _Parser(
        prog="kvq",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == command:
            module = importlib.import_module(f"kvq_tools.cli.commands.{name.replace('-', '_')}")
            module.configure(own)
            if name not in PASSED_ON:
                own.add_argument(
                    "--json", action="store_true", help="print one JSON object instead of text"
                )
            if name not in (*PASSED_ON, *WITHOUT_PROGRAMS):
                own.add_argument(
                    "--no-compilation-cache",
                    action="store_true",
                    help="do not keep compiled programs for the next run",
                )
            own.set_defaults(run=module.run)
    return parser


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show the library's own warnings as the command's. Those of others come as Python shows
    them."""
    original = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if category.__module__.startswith("kvq_"):
            print(f"kvq: warning: {message}", file=sys.stderr)
        else:
            original(message, category, *where)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = original


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = build_parser(arguments[0] if arguments else None)
    if not arguments or arguments[0] not in PASSED_ON or arguments[1:] in ([], ["--help"], ["-h"]):
        options = parser.parse_args(
            [*arguments, *(["--help"] if arguments and arguments[0] in PASSED_ON else [])]
        )
    else:
        options = parser.parse_args([arguments[0]])
        options.arguments = list(arguments[1:])
    return options


def _told(arguments: Sequence[str], error: str, status: int) -> int:
    """Return the exit code; with --json, what went wrong is also an object on stdout."""
    if "--json" in arguments:
        print_json("error", {"error": error, "status": status})
        sys.stdout.flush()
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvq` with these arguments (default: the process's). Return the exit code: 0, 2 for bad
    input, 3 where numbers are not finite, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    os.environ.setdefault(
        "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
    )  # transformers announces on import that it found no torch
    try:
        options = _parsed(arguments)
        interruption.begin()
        if not getattr(options, "no_compilation_cache", arguments[0] in WITHOUT_PROGRAMS):
            from kvq_tools.cli import (
                compilation_cache,
            )  # imports JAX, which the command's module has imported by now

            compilation_cache.begin()
        with _warnings_in_one_line():
            if hasattr(options, "cache"):
                from kvq_tools.cli import planned  # imports JAX, as above

                planned.settle(options)
            options.run(options)
        sys.stdout.flush()
    except NotFiniteError as error:
        print(f"kvq: error: {printable(str(error))}", file=sys.stderr)
        return NOT_FINITE
    except UserError as error:
        print(f"kvq: error: {error}", file=sys.stderr)
        return _told(arguments, str(error), BAD_INPUT)
    except KeyboardInterrupt as error:
        told = interruption.line(*map(str, error.args))
        print(told, file=sys.stderr)
        return _told(arguments, told.removeprefix("kvq: "), interruption.STATUS)
    except BrokenPipeError:
        # The reader of a pipe left (`kvq methods | head`). Python would complain again when it
        # flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
