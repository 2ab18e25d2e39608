"""Write the sources of the documentation site, which `make docs` builds with MkDocs.

    python -m tools.documentation build/docs

Pages keep their places in the repository, so that links between them work on the site as they do in
the repository. The API reference is a page for each package, with a section for each module that
defines public names: the docstrings are read by mkdocstrings, and nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import shutil
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/**/*.md",
    "kvq_jax/methods/*/README.md",
    "benchmarks/results/*.md",
    "laboratory/**/*.md",
)
PACKAGES = {"kvq_jax": "kvq_jax", "kvq_models": "models/kvq_models"}  # of the reference
LINK = re.compile(r"(\[[^\]]*\])\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def public_names(package: str, folder: pathlib.Path) -> dict[str, list[str]]:
    """Return the names of a package's `__all__` by the module that defines them, in the order of
    the imports."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    imports = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package)
        for alias in node.names
    }
    listed = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    modules: dict[str, list[str]] = {}
    for name, module in imports.items():
        if name in listed:
            modules.setdefault(module, []).append(name)
    return modules


def first_sentence(module: str, folder: pathlib.Path) -> str:
    path = folder.parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.]) ", paragraph)[0].rstrip(":.") + "."


def reference_page(package: str, folder: pathlib.Path) -> str:
    """Return the page of a package: mkdocstrings replaces each `:::` line by a docstring."""
    lines = [f"# {package}", "", "Public names, by the module that defines them.", ""]
    for module, names in public_names(package, folder).items():
        lines += [f"## {module}", "", first_sentence(module, folder), ""]
        for name in names:
            lines += [f"::: {package}.{name}", ""]
    return "\n".join(lines)


def methods_page(folder: pathlib.Path) -> str:
    """Return a list of the methods' pages, with the first paragraph of each."""
    lines = ["# Methods", ""]
    for page in sorted(folder.glob("*/README.md")):
        title, _, text = page.read_text(encoding="utf-8").partition("\n")
        paragraph = " ".join(text.strip().split("\n\n")[0].split())
        link = f"../{page.relative_to(ROOT).as_posix()}"
        paragraph = LINK.sub(r"\1", paragraph).replace("[", "").replace("]", "")
        lines += [f"- [{title.removeprefix('# ')}]({link}): {paragraph}"]
    return "\n".join([*lines, ""])


def on_site(text: str, page: pathlib.Path, linked: set[pathlib.Path]) -> str:
    """Return a page's text with links to folders as links to their README, or as plain text if they
    have none. Linked files of other kinds are added to `linked`."""

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = (page.parent / target).resolve()
        if path.is_dir():
            if not (path / "README.md").exists():
                return label[1:-1]
            target = f"{target.rstrip('/')}/README.md"
        elif path.is_file() and path.suffix != ".md":
            linked.add(path)
        return f"{label}({target}{anchor})"

    return LINK.sub(link, text)


def write(out: pathlib.Path) -> None:
    """Write all pages, and the files that they link to, into the folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    linked: set[pathlib.Path] = set()
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            text = on_site(page.read_text(encoding="utf-8"), page, linked)
            _write(out / page.relative_to(ROOT), text)
    for file in sorted(linked):
        target = out / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    for package, folder in PACKAGES.items():
        _write(out / f"reference/{package}.md", reference_page(package, ROOT / folder))
    _write(out / "reference/methods.md", methods_page(ROOT / "kvq_jax/methods"))


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the sources of the documentation site.")
    parser.add_argument("out", type=pathlib.Path, help="folder to write, replaced if it exists")
    write(parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
