"""Docstrings, comments and documents are plain English and short, held by counts over the whole
tree.

A condition is "if", not "where". A docstring begins with a verb or a noun, not with a clause
("What the row has"). An argument has its name, or "the given number", and is not "so many". A local
name says the value, not that there is one (`found`, `held`). Width is ruff's business (E501 at 100
columns).
"""

import ast
import collections
import io
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("cpu_kernels", "pallas_kernels", "kvq_jax", "models", "kvq_tools", "benchmarks")
OTHERS = ("kvq_hosts", "tools", "laboratory", "tests")
MOST_LINES, MOST_LINES_OF_A_DECISION = 400, 80
WHERE_PER_IF = 0.2  # "where" for each "if", at most, over the packages and docs/*.md
HEADLESS = 0  # docstrings that begin with a clause, at most
VAGUE_NAMES = 10  # places in functions that bind one of VAGUE, at most
VAGUE = ("own", "found", "held", "told")

CLAUSE = re.compile(r"\s*(?:What|Whether|How|Which|That of|Those of)\b")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)  # `jnp.where(...)` is not English
SO_MANY = re.compile(r"[^.]*\bso many\b(?!\s+[^.]*\bthat\b)[^.]*", re.IGNORECASE)
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def sources() -> Iterator[tuple[str, str]]:
    """Yield the path and content of every Python file of the packages."""
    for file in (file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))):
        yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def docstrings(source: str) -> list[str]:
    """Return every string that stands alone as a statement."""
    return [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def comments(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def where_and_if(texts: list[str]) -> collections.Counter[str]:
    """Count both words in texts, code in backticks left out."""
    words = (re.findall(r"(?<![\w.])(?:where|if)\b", CODE.sub("", t).lower()) for t in texts)
    return collections.Counter(word for of_text in words for word in of_text)


def headless(source: str) -> list[str]:
    """Return the first lines of docstrings that begin with a clause."""
    return [text.strip().splitlines()[0] for text in docstrings(source) if CLAUSE.match(text)]


def vague_names(source: str) -> list[str]:
    """Return the vague names that functions bind: assigned, looped over or taken as arguments."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTION)]
    inside = {node for function in functions for node in ast.walk(function)}
    names = [n.arg for n in inside if isinstance(n, ast.arg)]
    names += [n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return sorted(name for name in names if name in VAGUE)


def test_conditions_are_if_and_not_where():
    files = [docstrings(content) + comments(content) for _, content in sources()]
    assert len(files) > 200, "the walk finds no sources"
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    assert pages, "the walk finds no documents"
    count = sum(map(where_and_if, [*files, pages]), collections.Counter())
    assert count["where"] <= WHERE_PER_IF * count["if"], count


def test_docstrings_begin_with_a_verb_or_a_noun():
    lines = [f"{path}: {line}" for path, content in sources() for line in headless(content)]
    assert len(lines) <= HEADLESS, "\n".join(lines)


def unnamed_numbers(source: str) -> list[str]:
    """Return the sentences that call a number "so many"."""
    return [text for t in docstrings(source) + comments(source) for text in SO_MANY.findall(t)]


def test_arguments_have_their_names():
    lines = [f"{path}: {text}" for path, content in sources() for text in unnamed_numbers(content)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Wait for so many seconds.", 1),
        ("There are so many that a page is slow.", 0),
        ("Return many of them. So it is.", 0),
    ],
)
def test_so_many_is_refused_unless_it_means_a_large_number(text: str, count: int):
    assert len(unnamed_numbers(f'"""{text}"""\n')) == count


def long_files(files: Iterable[pathlib.Path], most: int) -> list[str]:
    counts = {file: file.read_text(encoding="utf-8").count("\n") for file in files}
    return [f"{file.relative_to(ROOT)}: {n} lines" for file, n in counts.items() if n > most]


def test_files_and_pages_of_decisions_are_short():
    folders = [ROOT / name for name in (*PACKAGES, *OTHERS)]
    code = [file for kind in ("py", "cc", "h") for f in folders for file in f.rglob(f"*.{kind}")]
    assert len(code) > 1000, "files are missing, so none of those is counted"
    assert not long_files(code, MOST_LINES)
    assert not long_files((ROOT / "docs/decisions").glob("*.md"), MOST_LINES_OF_A_DECISION)
    assert long_files([pathlib.Path(__file__)], 100)


def test_local_names_say_the_value():
    lines = [f"{path}: {name}" for path, content in sources() for name in vague_names(content)]
    assert len(lines) <= VAGUE_NAMES, "\n".join(lines)


@pytest.mark.parametrize("first", ["What", "Whether", "How", "Which", "That of", "Those of"])
def test_a_docstring_that_begins_with_a_clause_is_refused(first: str):
    assert headless(f'def f():\n    """{first} the row has."""\n')


@pytest.mark.parametrize(
    ("text", "where", "if_"),
    [
        ("Return None where no row is valid.", 1, 0),
        ("Where it is set, and if so `jnp.where(a if b else c)`", 1, 1),
        ("jnp.where, elsewhere, iffy", 0, 0),
        ("```\nif x: where(y)\n```\nIf it fits", 0, 1),
    ],
)
def test_both_words_are_counted_outside_code(text: str, where: int, if_: int):
    assert where_and_if([text]) == collections.Counter(where=where, **{"if": if_})
