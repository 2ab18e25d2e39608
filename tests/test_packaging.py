"""What an installed kvq contains: packages of our own names only, and the files that their code opens."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

import pytest

import kvq_jax

ROOT = pathlib.Path(__file__).parents[1]
OURS = {"kvq_jax", "kvq_models", "kvq_tools", "pallas_kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built as `pip install .` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (file,) = folder.glob("kvq_jax-*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile) -> set[str]:
    """Every file of the wheel."""
    return set(wheel.namelist())


def test_the_version_is_that_of_the_package(wheel: zipfile.ZipFile, installed: set[str]):
    (metadata,) = (name for name in installed if name.endswith(".dist-info/METADATA"))
    assert f"\nVersion: {kvq_jax.__version__}\n" in wheel.read(metadata).decode()


def test_the_version_is_read_without_importing_jax():
    """As an isolated build reads it, in which JAX is not installed."""
    read = "from setuptools.config import expand; print(expand.read_attr('kvq_jax.__version__', None, sys.argv[1]))"
    command = [sys.executable, "-c", f"import sys; sys.modules['jax'] = None; {read}", str(ROOT)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout.strip() == kvq_jax.__version__


def test_no_package_is_installed_whose_name_could_shadow_a_users_folder(installed: set[str]):
    tops = {name.split("/")[0] for name in installed if ".dist-info/" not in name}
    assert tops == OURS


def test_every_package_of_the_sources_is_installed(installed: set[str]):
    folders = {"kvq_models": ROOT / "models" / "kvq_models"}
    sources = [(name, folders.get(name, ROOT / name)) for name in sorted(OURS)]
    expected = {f"{name}/{file.relative_to(folder).as_posix()}" for name, folder in sources for file in folder.rglob("*.py")}
    assert expected <= installed, f"missing: {sorted(expected - installed)}"


def test_the_files_that_code_opens_travel_with_the_packages(installed: set[str]):
    embedded = {f"kvq_models/embedded/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md")}
    typed = {f"{name}/py.typed" for name in OURS}
    others = {"kvq_tools/cli/passage.txt", "kvq_tools/report/page.html.jinja", "kvq_jax/methods/kivi/README.md"}
    assert embedded | typed | others <= installed
    assert (ROOT / "models/kvq_models/embedded/model.safetensors").stat().st_size < 16e6
