"""Write the options of every command into the file that help and refusals read: `python -m
tools.declared_options`."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from kvq_jax.files.whole import replacing
from kvq_tools.cli import declared_options
from kvq_tools.cli.main import COMMANDS, PASSED_ON


def declared() -> dict[str, Any]:
    """Return what the modules of all commands declare."""
    commands = {}
    for name in COMMANDS:
        if name not in PASSED_ON:
            parser = argparse.ArgumentParser(prog=f"kvq {name}")
            module = importlib.import_module(f"kvq_tools.cli.commands.{name.replace('-', '_')}")
            module.configure(parser)
            commands[name] = declared_options.described(parser)
    return commands


if __name__ == "__main__":
    with replacing(declared_options.FILE) as unfinished:
        text = json.dumps(declared(), indent=1, ensure_ascii=False)
        unfinished.write_text(f"{text}\n", encoding="utf-8")
