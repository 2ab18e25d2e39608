"""What an installed kvq contains: every package that users import, and the files that its code opens."""

from __future__ import annotations

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed_but_those_that_run_in_a_checkout():
    sources = ("pallas_kernels", "kvq_jax", "models")
    found = {".".join(file.parent.relative_to(ROOT).parts) for name in sources for file in (ROOT / name).rglob("__init__.py")}
    assert set(SETUPTOOLS["packages"]) == found
    paragraph = next(part for part in (ROOT / "README.md").read_text().split("\n\n") if "pip install ." in part)
    assert all(f"`{name}`" in paragraph for name in sources), "README.md names the packages, so that users know which names are taken"


def test_the_embedded_model_and_the_demo_text_travel_with_the_package():
    def shipped(package):
        folder = ROOT.joinpath(*package.split("."))
        return {file.relative_to(folder).as_posix() for pattern in SETUPTOOLS["package-data"][package] for file in folder.glob(pattern)}

    assert {"embedded/config.json", "embedded/model.safetensors", "embedded/tokenizer.json", "embedded/README.md"} <= shipped("models")
    assert "passage.txt" in shipped("models.cli")
    assert (ROOT / "models/embedded/model.safetensors").stat().st_size < 16e6
