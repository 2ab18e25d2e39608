"""Every file, module, symbol and command that documents, docstrings and comments name exists.

Sources are read, not imported. `stale` gives the names in one text that lead nowhere.
"""

import ast
import builtins
import functools
import io
import keyword
import re
import tokenize
from collections.abc import Callable, Iterator

import pytest

from tests.named_things import FOLDERS, ROOT, parsed, project, text_files

HEADS = (  # of dotted names, past ones included
    "kvq|cpu_kernels|kvq_hosts|kvq_jax|kvq_models|kvq_tools|pallas_kernels|models|tools|benchmarks"
    "|laboratory|tests"
)
# what a.b may begin with, and names of lm-eval's tasks: not ours
NOT_OURS = {"jax", "jnp", "lax", "np", "pl", "safetensors", "torch", "transformers"}
NOT_OURS |= {"lm_eval", "gsm8k_cot"}
# of GPUs, in backticks like names of ours
INSTRUCTIONS = {"HFMA2", "lop3", "movmatrix", "or", "prmt", "sin.approx", "xor"}
# a file in backticks: looked for as a file
SUFFIXES = ("jinja", "json", "md", "model", "npz", "py", "safetensors", "svg", "txt")
# generated, or dated: their names are those of their day
QUOTES_HISTORY = (
    *("benchmarks/results/", "laboratory/results/", "docs/report/", "laboratory/notes/"),
)

OF_OTHERS = ("docs/serving_hosts.md",)  # names files and classes of other projects

PATH = re.compile(rf"(?<![\w./<{{-])(?:{'|'.join(FOLDERS)}|kvq_models)/[\w./*-]*[\w*/]")
FILE = re.compile(r"(?<![\w./*<>{}-])(?:[\w-]+/)*[\w-]+\.(?:py|md|sh|toml|svg|jinja)\b(?![\w/])")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")
DOTTED = re.compile(rf"(?<![\w./-])(?:{HEADS})(?:\.[A-Za-z_]\w*)+(?![\w/])")
IMPORT = re.compile(r"\bfrom ((?:kvq|pallas)_[\w.]+) import (\w+(?:, \w+)*)")
QUOTED = re.compile(r"`{1,2}([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`")
RUN = re.compile(r"(?:python|\$\(RUN\)) -m\s+((?:benchmarks|laboratory|tools|kvq_\w+)[\w.]*\w)")
MAKE = re.compile(r"(?:`|^)make ([a-z]+)", re.MULTILINE)
COMMAND = re.compile(r"(?:`|^|\$ )kvq ([a-z][\w-]*)", re.MULTILINE)
FORMATS = "docs/json.md"  # names formats as kvq and a dot and the command
EXTRA = re.compile(r"pip install [^\n]*?['\"](kvq[\w-]*|\.)\[([\w,]+)\]")


def file_exists(name: str, beside: str) -> bool:
    """Return whether a path leads somewhere from the project, from `models/`, or from the file that
    names it; a bare name, anywhere."""
    if "*" in name:
        return any(ROOT.glob(name.rstrip("/")))
    if any((folder / name).exists() for folder in (ROOT, ROOT / "models", (ROOT / beside).parent)):
        return True
    return name.split("/")[0] not in FOLDERS and any(
        f"/{file}".endswith(f"/{name}") for file in project().files
    )


def dotted_exists(name: str) -> bool:
    """Return whether the longest part of the name that is a module has the next part at its top,
    and code the rest. kvq_jax makes specs by the names of methods' classes, too."""
    parts = re.sub(r"^kvq\.", "kvq_jax.", name).split(".")
    modules = project().modules
    for i in range(len(parts), 0, -1):
        if (known := modules.get(".".join(parts[:i]))) is not None:
            if parts[:i] == ["kvq_jax"]:
                of_methods = (m for m in modules if m.startswith("kvq_jax.methods."))
                known = known.union(*(modules[module] for module in of_methods))
            return not parts[i:] or (parts[i] in known and set(parts[i:]) <= project().identifiers)
    return False


def dotted_in_page(path: str, name: str) -> bool:
    """Return whether a dotted name leads somewhere: also a file, and on the page of the JSON
    formats one that a command prints."""
    named = path == FORMATS and name.removeprefix("kvq.") in project().identifiers
    return name.endswith(".py") or dotted_exists(name) or named


def imports_exist(module: str, names: str) -> bool:
    return all(dotted_exists(f"{module}.{name}") for name in names.split(", "))


def quoted_exists(name: str) -> bool:
    """Return whether code has every part of the name."""
    first, *rest = name.split(".")
    if (
        first in NOT_OURS
        or first.startswith("JAX_")
        or keyword.iskeyword(first)
        or name in INSTRUCTIONS
        or (rest and rest[-1] in SUFFIXES)
    ):
        return True
    if rest and re.fullmatch(HEADS, first):
        return dotted_exists(name)
    return {first, *rest} <= known_names()


@functools.cache
def known_names() -> frozenset[str]:
    modules = {module.split(".")[-1] for module in project().modules}
    return frozenset(
        {*project().identifiers, *project().commands, *project().extras, *dir(builtins), *modules}
    )


def prose(path: str, content: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and texts: of a program its comments and docstrings, of another file
    everything."""
    if not path.endswith(".py"):
        yield 1, content
        return
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(parsed(content)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def stale(path: str, content: str) -> list[str]:
    """Names in a file that lead nowhere, each with its line."""
    known, found = project(), []

    def look(
        pattern: re.Pattern[str], line: int, text: str, wrong: Callable[[re.Match[str]], bool]
    ) -> None:
        for match in pattern.finditer(text):
            if wrong(match):
                found.append(f"{path}:{line + text[: match.start()].count(chr(10))}: {match[0]}")

    for line, text in prose(path, content):
        look(PATH, line, text, lambda m: not file_exists(m[0], path))
        if path not in OF_OTHERS:
            look(FILE, line, text, lambda m: not file_exists(m[0], path))
            look(QUOTED, line, text, lambda m: not quoted_exists(m[1]))
        look(DOTTED, line, text, lambda m: not dotted_in_page(path, m[0]))
        look(IMPORT, line, text, lambda m: not imports_exist(m[1], m[2]))
        look(RUN, line, text, lambda m: m[1] not in known.programs)
        look(MAKE, line, text, lambda m: m[1] not in known.targets)
        look(COMMAND, line, text, lambda m: m[1] not in known.commands)
        if path.endswith(".md"):
            look(LINK, line, text, lambda m: not (ROOT / path).parent.joinpath(m[1]).exists())

    def unknown_extra(m: re.Match[str]) -> bool:
        return m[1] not in (known.distribution, ".") or not set(m[2].split(",")) <= known.extras

    if not path.startswith("tests/"):
        look(EXTRA, 1, content, unknown_extra)
    return found


def test_what_is_named_exists():
    files = [
        (path, content) for path, content in text_files() if not path.startswith(QUOTES_HISTORY)
    ]
    assert len(files) > 200, "the walk finds no sources"
    found = [line for path, content in files for line in stale(path, content)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/design.md", "see kvq_jax/group_codec.py"),
        ("docs/design.md", "[decisions](no_such_page.md)"),
        ("docs/design.md", "in `planes.py`"),
        ("docs/design.md", "`kvq.trim_rows(cache, 3)`"),
        ("docs/design.md", "from kvq_models import EMBEDDED, load_lama"),
        ("docs/design.md", "`no_such_function` does it"),
        ("docs/design.md", "`python -m benchmarks.attention`"),
        ("docs/design.md", "`make benchmark`"),
        ("docs/design.md", "kvq evaluate embedded --text F"),
        ("docs/design.md", "pip install 'k" + "vq[report]'"),
        ("kvq_jax/cache/spec.py", '"""Keys without their bias (bias.py)."""'),
    ],
)
def test_a_stale_reference_is_found(path: str, text: str):
    assert stale(path, text)
