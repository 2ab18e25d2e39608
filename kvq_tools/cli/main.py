"""The entry point of `kvq`: find the command, run it, and turn errors into one line and an exit
code.

A command is two modules of one name. The one in `kvq_tools.cli.options` has its help, DESCRIPTION
and EPILOG, and declares its arguments in `configure(parser)`. It needs no JAX. The one in
`kvq_tools.cli.commands` does the work in `run(options)`.
Each command has one line in COMMANDS. Only the modules of the command in use are imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvq_jax.did_you_mean import hint
from kvq_tools import chat_template
from kvq_tools.cli import console, interruption

BAD_OUTPUT, BAD_INPUT, NOT_FINITE = 1, 2, 3

COMMANDS = {
    "demo": "try several caches on the small embedded model and compare them",
    "fetch": "download a public model so that you can use it by name",
    "chat": "chat with a model; all turns share one cache",
    "generate": "continue a prompt, or many prompts, through a cache",
    "prefill": "read a prompt and save its cache, for generate --from to continue",
    "serve": "serve a model to many clients through an OpenAI-compatible API",
    "eval": "compare caches on a text: perplexity, KL, top-1 agreement, size",
    "report": "write a self-contained page with plots of quality, size, speed and errors",
    "passkey": "hide a pass key in a long text and ask for it",
    "niah": "hide needles in a haystack and ask for them, as RULER does",
    "ruler": "run RULER's tasks on variables and frequent words",
    "lm-eval": "run lm-evaluation-harness with kvq among its models",
    "memory": "count the exact bytes of a cache, from config.json alone",
    "calibrate": "fit the parameters that some caches need, on a text",
    "plan": "find the best cache for a budget of bits, bytes or speed",
    "quantize-weights": "write a checkpoint whose weights take only a few distinct values",
    "methods": "list the cache methods with their options, defaults and sources",
    "doctor": "explain layer by layer what a cache does to a model, and warn of problems",
}

PASSED_ON = ("lm-eval",)  # commands that hand their arguments to another program
# commands that print or keep what is complete if SIGTERM ends them, as after Ctrl-C
KEEPING = ("eval", "generate", "niah", "passkey", "plan", "report", "ruler")
WITHOUT_PROGRAMS = ("fetch", "memory", "methods")  # commands that compile nothing

DESCRIPTION = """\
KV-cache quantization for JAX: runs Hugging Face checkpoints of the Llama family
with a cache that is 2 to 7 times smaller than in bf16."""

EPILOG = """\
start here:
  kvq demo               compare caches on the small embedded model, no download
  kvq methods            list what --cache accepts
  kvq generate embedded --prompt "It was" --cache kivi:bits=2 \\
      --temperature 0.6 --max-new-tokens 400
  kvq fetch smollm2      download a model of 135 million parameters, which every
                         command then accepts as MODEL

`kvq COMMAND --help` explains every option. With --json, a command prints one
JSON object and nothing else on stdout; errors are JSON, too."""


class _Parser(argparse.ArgumentParser):
    """An argparse parser that reports a bad command line in one line, like any other error."""

    def __init__(self, **options: Any) -> None:
        shared = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**shared, **options)

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):  # argparse takes -1bits for an option
            name = message.split()[1].rstrip(":")
            message += f"; one that begins with - needs an =, as in {name}=-1"
        raise console.UserError(f"{message} (see {self.prog} --help)")


class _CommandParser(_Parser):
    """The parser of one command. It looks for unknown options first, so that a misspelt option is
    not reported as a missing one."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        known = self._option_string_actions
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            args_to_check = []  # they are another program's
        else:
            args_to_check = itertools.takewhile(lambda argument: argument != "--", args or ())
        for argument in args_to_check:
            name = argument.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in known:
                raise console.UserError(
                    f"{self.prog} has no option {name}.{hint(name, known)} See {self.prog} --help"
                )
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    """Print the version. argparse's own action would import JAX for the help of every command."""

    def __call__(self, *_: object) -> NoReturn:
        from kvq_jax import __version__

        print(f"kvq {__version__}")
        raise SystemExit(0)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. Only `command` gets its arguments."""
    parser = _Parser(prog="kvq", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary)
        if name == command:
            subparser.set_defaults(command=name)
            options = _module("options", name)
            subparser.description, subparser.epilog = options.DESCRIPTION, options.EPILOG
            options.configure(subparser)
            if name not in PASSED_ON:
                subparser.add_argument(
                    "--json", action="store_true", help="print one JSON object instead of text"
                )
            if name not in (*PASSED_ON, *WITHOUT_PROGRAMS):
                subparser.add_argument(
                    "--no-compilation-cache",
                    action="store_true",
                    help="do not save compiled programs for the next run",
                )
    return parser


def _module(folder: str, command: str) -> Any:
    return importlib.import_module(f"kvq_tools.cli.{folder}.{command.replace('-', '_')}")


UNKEPT = "Error writing persistent compilation cache entry"  # JAX's words


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print the library's warnings as one line of the command, and JAX's about the folder of
    compiled programs as one for all of them. Others look as Python shows them."""
    original = warnings.showwarning
    unkept: list[str] = []

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if category.__module__.startswith("kvq_"):
            console.note(f"warning: {message}")
        elif (text := str(message).partition("\n")[0]).startswith(UNKEPT):
            if not unkept:
                reason = text.rpartition("] ")[2]
                console.note(f"warning: compiled programs are not kept: {reason}")
            unkept.append(text)
        else:
            original(message, category, *where)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = original


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    command = arguments[0]
    if not command.startswith("-") and command not in COMMANDS:
        raise console.UserError(
            f"kvq has no command {command!r}.{hint(command, COMMANDS)} `kvq --help` lists all"
        )
    parser = build_parser(command)
    if command not in PASSED_ON:
        options = parser.parse_args(arguments)
        _check_model(options)
        return options
    if arguments[1:] in ([], ["--help"], ["-h"]):
        return parser.parse_args([command, "--help"])
    options = parser.parse_args([command])
    options.arguments = list(arguments[1:])
    return options


def _check_model(options: argparse.Namespace) -> None:
    """Refuse a local model that is not supported before JAX is imported, and a current folder that
    is gone, which readers of tokenizers would report as a missing file of the model."""
    model = getattr(options, "model", None)
    if model is None:
        return
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise console.UserError(
            "the current folder was deleted; change to one that exists"
        ) from error
    with console.input_errors():  # the system refuses some names, such as those that are too long
        if Path(model).exists():
            from kvq_models.llama.open_checkpoint import read_config  # imported late: 0.2 s

            read_config(model)


def _failed(error: str, status: int) -> int:
    """Print an error in one line, and return the exit code."""
    error = console.printable(error)
    console.note(f"error: {error}")
    return _exit_code(error, status)


def _exit_code(error: str, status: int) -> int:
    """Return the exit code. With --json, also print the error as an object on stdout, unless the
    command has printed its own."""
    if interruption.json_promised():
        console.print_json("error", {"error": error, "status": status})
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvq` and return its exit code.

    0 is success, 1 output or a file that cannot be written, 2 bad input, 3 results that are not
    finite, and 130 Ctrl-C.

    Args:
        arguments: the command line after `kvq`, by default that of the process.
    """
    if sys.stderr is None:  # closed by the caller (`2>&-`); print would use stdout instead
        sys.stderr = io.StringIO()
    with contextlib.redirect_stderr(console.Messages(sys.stderr)):
        return _checked(sys.argv[1:] if arguments is None else list(arguments))


def _checked(arguments: list[str]) -> int:
    """Run the command. A stdout that cannot be written is an error."""
    if sys.stdout is None:  # `>&-`
        console.note("error: stdout is closed; redirect it to a file or /dev/null")
        return BAD_OUTPUT
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a locale may lack characters
    try:
        with contextlib.redirect_stdout(console.CheckedOutput(sys.stdout)):
            try:
                return _run(arguments)
            finally:
                sys.stdout.flush()
    except console.OutputError as error:
        console.discard(sys.stdout)
        if not isinstance(error.__cause__, BrokenPipeError):  # `kvq methods | head` is not an error
            console.note(f"error: {error}")
        return BAD_OUTPUT


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        build_parser().print_help()
        return 0
    # otherwise transformers announces on import that it found no torch
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    interruption.promise_json(_interruption_as_json if "--json" in arguments else None)
    try:
        options = _parsed(arguments)
        if arguments[0] == "chat" or getattr(options, "chat", False):
            chat_template.start()  # a second of another processor, during the import of JAX
        command = _module("commands", arguments[0])  # imports JAX
        interruption.begin(terminates=arguments[0] in KEEPING)
        if not getattr(options, "no_compilation_cache", arguments[0] in WITHOUT_PROGRAMS):
            from kvq_tools.cli import compilation_cache

            compilation_cache.begin()
        with _warnings_in_one_line():
            if getattr(options, "cache", None) is not None:
                from kvq_tools.cli import planned

                planned.resolve(options)
            command.run(options)
    except console.UserError as error:
        return _failed(str(error), BAD_INPUT)
    except console.NotFiniteError as error:
        return _failed(str(error), NOT_FINITE)
    except OSError as error:
        if error.errno not in console.FULL:
            raise
        file = error.filename or "a file"
        return _failed(f"{file} cannot be written: {error.strerror}", BAD_OUTPUT)
    except KeyboardInterrupt as error:
        line = interruption.line(*map(str, error.args))
        console.note(line)
        return _exit_code(line, interruption.STATUS)
    return 0


def _interruption_as_json(line: str) -> str:
    return console.json_object("error", {"error": line, "status": interruption.STATUS})
