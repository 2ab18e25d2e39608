"""The notebook of the documentation runs from its first cell to its last, and shows what it did
when it was written."""

import json
import pathlib
import re

import pytest

from tools import notebook

FILE = pathlib.Path(__file__).parents[2] / "docs" / "first_steps.ipynb"


def read():
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_every_cell_runs_and_shows_what_it_showed():
    written = [cell["outputs"] for cell in notebook.code_cells(read())]
    found = notebook.run(read())
    assert [[sorted(output.get("data", {"stream": 0})) for output in cell] for cell in found] == [
        [sorted(output.get("data", {"stream": 0})) for output in cell] for cell in written
    ]
    tables = [cell[-1]["data"] for cell in found if "text/html" in cell[-1].get("data", {})]
    assert [table["text/plain"][0].partition("(")[0] for table in tables] == [
        "Cache",
        "Generated",
        "Evaluation",
    ], "each kind has a table"
    assert found[1] == written[1], "an empty cache is told by its layout alone"
    assert found[3] == written[3], "bytes and quantized tokens do not depend on the machine"


def test_it_is_a_notebook_of_nbformat_4():
    cells = read()["cells"]
    assert (read()["nbformat"], read()["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        wanted = {"cell_type", "id", "metadata", "source"} | (
            {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        )
        assert set(cell) == wanted, cell["id"]


def test_links_lead_to_a_page_and_a_heading_of_it():
    text = "".join("".join(cell["source"]) for cell in read()["cells"])
    links = re.findall(r"\]\(([^)#:]+)#?([^)]*)\)", text)
    assert links
    for name, anchor in links:
        page = (FILE.parent / name).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)", page, re.MULTILINE)
        assert not anchor or anchor in {h.lower().replace(" ", "-") for h in headings}, name


def test_a_cell_that_fails_fails_the_run(tmp_path):
    cell = {"cell_type": "code", "source": ["x = 1\n", "print(x)\n", "x + 1"]}
    assert [
        output.get("text") or output["data"] for output in notebook.run({"cells": [cell]})[0]
    ] == [["1\n"], {"text/plain": ["2"]}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": [cell, cell | {"source": ["1 / 0"]}]}))
    before = (tmp_path / "n.ipynb").read_text()
    with pytest.raises(ZeroDivisionError):
        notebook.main([str(tmp_path / "n.ipynb")])
    assert (tmp_path / "n.ipynb").read_text() == before
