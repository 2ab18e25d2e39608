"""Everything in the project that a text can name: files, modules, members, programs, commands.

Sources are read, not imported.
"""

import ast
import collections
import dataclasses
import functools
import pathlib
import re
import tomllib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = (
    *("cpu_kernels", "kvq_jax", "kvq_hosts", "pallas_kernels", "models", "kvq_tools"),
    *("tools", "benchmarks", "laboratory", "tests", "docs"),
)
OTHERS = ("README.md", "Makefile", ".ci/run", "pyproject.toml", ".pre-commit-config.yaml")


@dataclasses.dataclass
class Project:
    """Everything that can be named."""

    files: set[str]
    modules: dict[str, set[str]]  # dotted name -> what stands at its top; a package's modules too
    identifiers: set[str]  # every name in code, and every string that could be an option or a key
    programs: set[str]  # what `python -m` runs
    targets: set[str]  # of the Makefile
    commands: set[str]  # of kvq
    extras: set[str]
    distribution: str


def text_files() -> Iterator[tuple[str, str]]:
    """Yield path (relative to the project) and content of what is written by hand."""
    inside = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*")))
    written = [file for file in inside if file.suffix in (".py", ".md", ".sh")]
    for file in [*(ROOT / name for name in OTHERS), *written]:
        yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


@functools.cache
def parsed(content: str) -> ast.Module:
    return ast.parse(content)


def top_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's or a class's statements bind, and the strings of
    `__all__`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            stored = [
                name.id
                for name in ast.walk(node)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            ]
            yield from stored
            if stored == ["__all__"]:
                yield from (
                    text.value
                    for text in ast.walk(node)
                    if isinstance(text, ast.Constant) and isinstance(text.value, str)
                )
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from top_names(
                [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            )


def used_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.arg(arg=name)
                | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), other or name)
            case ast.Constant(value=str(text)) if re.fullmatch(r"(--)?\w[\w-]*", text):
                yield text.lstrip("-").replace("-", "_")


@functools.cache
def project() -> Project:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    inside = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))
    kept = (file for file in inside if "__pycache__" not in file.parts)
    files = {file.relative_to(ROOT).as_posix() for file in kept} | {".ci/run"}
    files |= {file.name for file in ROOT.iterdir() if file.is_file()}
    trees, modules, programs = [], collections.defaultdict(set), set()
    for path, content in text_files():
        if path.endswith(".py"):
            trees.append(parsed(content))
            parts = pathlib.PurePath(path.removeprefix("models/")).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            modules[".".join(parts)] |= set(top_names(trees[-1].body))
            if parts[-1] == "__main__":
                programs.add(".".join(parts[:-1]))
            elif '__name__ == "__main__"' in content:
                programs.add(".".join(parts))
            for i in range(1, len(parts)):
                modules[".".join(parts[:i])].add(parts[i])
    main = parsed((ROOT / "kvq_tools/cli/main.py").read_text(encoding="utf-8"))
    commands = next(
        ast.literal_eval(node.value)
        for node in main.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS"
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return Project(
        files,
        dict(modules),
        {name for tree in trees for name in used_names(tree)},
        programs,
        set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE)),
        set(commands),
        set(settings["optional-dependencies"]),
        settings["name"],
    )
