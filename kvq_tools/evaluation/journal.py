"""Rows that a run has measured so far, on disk, so that a stopped run can continue.

The file has one line of JSON for its run (model, texts, sizes) and one for each row. Lines that
cannot be read, as one that was cut short by a kill, are dropped: their rows are measured again.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from kvq_jax.files import whole
from kvq_jax.files.json_text import parse_json
from kvq_tools import json_lines


class Journal:
    """The rows of an unfinished run by key. Raises ValueError if the file belongs to another run,
    or if its first line cannot be read."""

    def __init__(self, file: pathlib.Path, run: dict[str, Any]):
        self.file, self.rows = file, dict[str, Any]()
        run = json.loads(json.dumps(run))
        first, *rows = _lines(file) or [run]
        if first != run:
            stated = first if isinstance(first, dict) else {}
            different = ", ".join(name for name in run if stated.get(name) != run[name])
            raise ValueError(
                f"{file} holds rows of another run ({different}): delete it to begin anew"
            )
        readable = [row for row in rows if isinstance(row, dict) and row.keys() >= {"key", "row"}]
        self.rows = {str(row["key"]): row["row"] for row in readable}
        if len(readable) < len(rows) or not file.exists():
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


def _lines(file: pathlib.Path) -> list[Any]:
    """Return the value of each line, None for one that cannot be read."""

    def value(line: bytes) -> Any:
        try:
            return parse_json(line)
        except ValueError:
            return None

    if not file.exists():
        return []
    *lines, rest = file.read_bytes().split(b"\n")
    return [value(line) for line in lines] + [None] * bool(rest)
