"""The options of every command, read from a file, so that help and refusals need no JAX.

The modules of the commands take their types and defaults from the library, whose import takes a
second. `python -m tools.declared_options` writes what they declare into options.json: a command
line is checked against it first. Values that a type must parse are left to the command.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("options.json")
_STORE, _TRUE, _APPEND, _BOOLEAN = "store", "store_true", "append", "boolean"


def described(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return what `configure` declares: texts, and each option with its help."""
    groups = parser._mutually_exclusive_groups
    declared = [action for action in parser._actions if action.dest != "help"]
    return {
        "description": parser.description,
        "epilog": parser.epilog,
        "groups": [group.required for group in groups],
        "options": [_option(parser, action, groups) for action in declared],
    }


def _option(parser: argparse.ArgumentParser, action: argparse.Action, groups: Any) -> dict:
    default = action.default
    text = action.help and action.help % {**vars(action), "prog": parser.prog, "default": default}
    kind = {
        argparse._StoreTrueAction: _TRUE,
        argparse._AppendAction: _APPEND,
        argparse.BooleanOptionalAction: _BOOLEAN,
    }
    choices, metavar = action.choices, action.metavar
    if choices is not None and not all(isinstance(choice, str) for choice in choices):
        choices, metavar = None, f"{{{','.join(map(str, choices))}}}"  # they follow a type
    option = {
        "flags": list(action.option_strings),
        "dest": action.dest,
        "action": kind.get(type(action), _STORE),
        "nargs": action.nargs if kind.get(type(action), _STORE) in (_STORE, _APPEND) else None,
        "choices": None if choices is None else list(choices),
        "metavar": metavar,
        "required": action.required,
        "default": default if isinstance(default, str) else None,
        "help": text,
        "group": next((i for i, g in enumerate(groups) if action in g._group_actions), None),
    }
    return {name: value for name, value in option.items() if value is not None}


def configure(parser: argparse.ArgumentParser, command: str) -> None:
    """Declare the options of a command as its module does, without their types."""
    declared = _all()[command]
    parser.description, parser.epilog = declared["description"], declared["epilog"]
    groups = [parser.add_mutually_exclusive_group(required=r) for r in declared["groups"]]
    for option in declared["options"]:
        where = groups[option["group"]] if "group" in option else parser
        rest = {k: v for k, v in option.items() if k not in ("flags", "group", "action", "help")}
        if option["action"] == _BOOLEAN:
            rest["action"] = argparse.BooleanOptionalAction
            option = option | {"flags": option["flags"][:1]}  # it adds the other itself
        elif option["action"] != _STORE:
            rest["action"] = option["action"]
        if not option["flags"]:
            del rest["dest"], rest["required"]
        names = option["flags"] or [option["dest"]]
        where.add_argument(*names, **rest, help=option.get("help", "").replace("%", "%%"))


@functools.cache
def _all() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))
