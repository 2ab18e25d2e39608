"""Run a notebook's code cells in one namespace and keep what they show: `python -m tools.notebook
docs/first_steps.ipynb`.

No kernel and no Jupyter are needed: a cell's output is what it prints, and the value of its last
line, as text and, where it has one, as an HTML table.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from kvq_jax.files import whole

Outputs = list[dict[str, Any]]  # of one cell, as nbformat 4 has them


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> list[Outputs]:
    """Run all code cells, one after the other, and return the outputs of each. Whatever a cell
    raises is raised."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [
        _run("".join(cell["source"]), namespace, count)
        for count, cell in enumerate(code_cells(notebook), 1)
    ]


def _run(source: str, namespace: dict[str, Any], count: int) -> Outputs:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"<cell {count}>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {count}>", "eval"), namespace)
    outputs: Outputs = []
    if printed.getvalue():
        outputs.append(
            {
                "name": "stdout",
                "output_type": "stream",
                "text": printed.getvalue().splitlines(keepends=True),
            }
        )
    if value is not None:
        outputs.append(
            {
                "data": _shown(value),
                "execution_count": count,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def _shown(value: Any) -> dict[str, list[str]]:
    """Return a value as a notebook shows it, by MIME type."""
    html = getattr(value, "_repr_html_", None)
    return {"text/plain": [repr(value)]} | ({"text/html": [html()]} if html else {})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.notebook", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("file", type=Path, help="the notebook; its outputs are replaced")
    file = parser.parse_args(sys.argv[1:] if arguments is None else arguments).file
    notebook = json.loads(file.read_text(encoding="utf-8"))
    for count, (cell, outputs) in enumerate(
        zip(code_cells(notebook), run(notebook), strict=True), 1
    ):
        cell |= {"execution_count": count, "outputs": outputs}
    whole.write(file, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
