"""Rows that a run has measured so far, on disk, so that a stopped run can continue.

The file has one line of JSON for its run (model, texts, sizes) and one for each row. A line that
was cut short by a kill is dropped.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from kvq_jax.files import whole
from kvq_jax.files.json_text import parse_json
from kvq_tools import json_lines


class Journal:
    """The rows of an unfinished run by key. Raises ValueError if the file belongs to another
    run."""

    def __init__(self, file: pathlib.Path, run: dict[str, Any]):
        self.file, self.rows = file, dict[str, Any]()
        run = json.loads(json.dumps(run))
        lines = _whole_lines(file)
        if lines and lines[0] != run:
            different = ", ".join(name for name in run if lines[0].get(name) != run[name])
            raise ValueError(
                f"{file} holds rows of another run ({different}): delete it to begin anew"
            )
        self.rows = {line["key"]: line["row"] for line in lines[1:]}
        self._write([run, *({"key": key, "row": row} for key, row in self.rows.items())])

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add a row. It is on disk when this returns."""
        self.rows[key] = row
        with self.file.open("ab") as out:
            json_lines.append(out, {"key": key, "row": row})

    def delete(self) -> None:
        """Delete the file: its run is complete."""
        self.file.unlink(missing_ok=True)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        whole.write(self.file, "".join(json.dumps(line) + "\n" for line in lines))


def _whole_lines(file: pathlib.Path) -> list[dict[str, Any]]:
    lines = []
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else ():
        try:
            lines.append(parse_json(line))
        except ValueError:
            break
    return lines
