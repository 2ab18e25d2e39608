"""The installed distribution: packages of our own names only, the files that their code opens, and
what runs without the sources."""

import compileall
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import kvq_jax

ROOT = pathlib.Path(__file__).parents[1]
OURS = {"cpu_kernels", "kvq_hosts", "kvq_jax", "kvq_models", "kvq_tools", "pallas_kernels"}


COMPILERS = ("c++", "g++", "clang++")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the wheel, built as `pip install .` builds it, from a copy: what an earlier build left
    beside the sources stays out of it.

    Its kernels are not optimized, which would take half a minute: a compiler that calls the real
    one adds -O0, and the last -O counts. It also writes down what it compiles.
    """
    folder = tmp_path_factory.mktemp("wheel")
    if (real := next(filter(None, map(shutil.which, COMPILERS)), None)) is None:
        return build(folder, dict(os.environ))
    quick = folder / "quick"
    note = f'case " $* " in *" -c "*) echo "$*" >>"{folder}/compiled"; esac'
    quick.write_text(f'#!/bin/sh\n{note}\nexec "{real}" "$@" -O0\n')
    quick.chmod(0o755)
    return build(folder, os.environ | {"CXX": str(quick)})


def build(folder: pathlib.Path, environment: dict[str, str]) -> pathlib.Path:
    source = folder / "source"
    ignored = shutil.ignore_patterns(
        ".*", "build", "*.egg-info", "__pycache__", "tests", "results", "*.so"
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    options = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    command = [sys.executable, *options, str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (wheel,) = folder.glob("kvq_jax-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: pathlib.Path) -> set[str]:
    """Return every file of the wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def site(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with the wheel unpacked, as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(program: str, site: pathlib.Path, folder: pathlib.Path) -> str:
    """Return what a program prints in an empty folder, where only the wheel has our packages."""
    environment = os.environ | {
        "PYTHONPATH": str(site),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    check = f"import kvq_jax\nassert kvq_jax.__file__.startswith({str(site)!r}), kvq_jax.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", program + "\n" + check],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_package_is_installed_whose_name_could_shadow_a_users_folder(installed: set[str]):
    tops = {name.split("/")[0] for name in installed if ".dist-info/" not in name}
    assert tops == OURS


def test_every_package_of_the_sources_is_installed(installed: set[str]):
    folders = {"kvq_models": ROOT / "models" / "kvq_models"}
    sources = [(name, folders.get(name, ROOT / name)) for name in sorted(OURS)]
    expected = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in sources
        for file in folder.rglob("*.py")
    }
    assert expected <= installed, f"missing: {sorted(expected - installed)}"


def test_the_files_that_code_opens_travel_with_the_packages(installed: set[str]):
    embedded = {
        f"kvq_models/embedded/{name}"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md")
    }
    typed = {f"{name}/py.typed" for name in OURS}
    others = {
        "kvq_tools/cli/passage.txt",
        "kvq_tools/report/page.html.jinja",
        "kvq_tools/serving/page.html",
        "kvq_jax/methods/kivi/README.md",
    }
    assert embedded | typed | others <= installed
    assert (ROOT / "models/kvq_models/embedded/model.safetensors").stat().st_size < 16e6


def has_kernels(files: set[str]) -> bool:
    return any(re.fullmatch(r"cpu_kernels/native\..*\.?so", name) for name in files)


def test_the_kernels_are_compiled_where_there_is_a_compiler(installed: set[str]):
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler is on the PATH")
    assert has_kernels(installed)


def test_a_checkout_that_is_installed_again_compiles_what_changed(wheel: pathlib.Path):
    """As into the environments of several Pythons. ffi.cc always: it has the hash of all files."""
    if not (compiled := wheel.parent / "compiled").exists():
        pytest.skip("no C++ compiler is on the PATH")
    source = wheel.parent / "source"
    assert len(re.findall(r"\w+\.cc", compiled.read_text())) > 10, "the first compiles everything"
    compiled.unlink()
    for name, line in {"tasks": "int one_more;", "split": "// one more comment"}.items():
        with (source / f"cpu_kernels/csrc/{name}.cc").open("a") as file:
            file.write(f"\n{line}\n")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        check=True,
        capture_output=True,
        cwd=source,
        env=os.environ | {"CXX": str(wheel.parent / "quick")},
    )
    assert set(re.findall(r"(\w+)\.cc", compiled.read_text())) == {"tasks", "ffi"}


def test_an_installation_without_a_compiler_has_all_but_the_kernels(
    installed: set[str], tmp_path: pathlib.Path
):
    nothing = tmp_path / "bin"
    nothing.mkdir()
    bare = build(tmp_path, os.environ | {"PATH": str(nothing), "CXX": ""})
    files = set(zipfile.ZipFile(bare).namelist())
    assert not has_kernels(files)
    assert files == {name for name in installed if not has_kernels({name})}
    zipfile.ZipFile(bare).extractall(tmp_path / "site")
    program = "from kvq_jax.attention import dispatch; print(dispatch.kernels_here())"
    assert "none: the CPU kernels were not compiled when kvq was installed" in run(
        program, tmp_path / "site", tmp_path
    )


def test_the_version_is_that_of_the_package(wheel: pathlib.Path, installed: set[str]):
    (metadata,) = (name for name in installed if name.endswith(".dist-info/METADATA"))
    assert f"\nVersion: {kvq_jax.__version__}\n" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_the_version_is_read_without_importing_jax():
    """As an isolated build reads it, in which JAX is not installed."""
    program = """
import sys
sys.modules["jax"] = None
from setuptools.config import expand
print(expand.read_attr("kvq_jax.__version__", None, sys.argv[1]))
"""
    command = [sys.executable, "-c", program, str(ROOT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == kvq_jax.__version__


def test_the_snippet_of_readme_runs_from_an_empty_folder(
    site: pathlib.Path, tmp_path: pathlib.Path
):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    printed = run(snippet, site, tmp_path)
    said = re.search(r"\w.*\n(\d+) of (\d+) tokens, \d+ bytes", printed, re.DOTALL)
    assert said, printed
    assert int(said[1]) > int(said[2]) / 2, "the example reads few quantized tokens"


def needed_alone() -> set[str]:
    """Return the import names of what `pip install kvq-jax` installs: its dependencies and
    theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, open_ends = set(), [re.split(r"[^\w-]", need)[0] for need in project["dependencies"]]
    while open_ends:
        name = open_ends.pop()
        if name not in found:
            found.add(name)
            needs = importlib.metadata.requires(name) or ()
            open_ends += [re.split(r"[^\w-]", n)[0] for n in needs if "extra ==" not in n]
    assert {"jax", "jaxlib", "safetensors", "filelock"} <= found
    assert {"flax", "transformers", "rich"}.isdisjoint(found)
    return {name.replace("-", "_") for name in found}


# nothing else can be imported
ALONE = """
import importlib.machinery, sys
class Allowed:
    find_distributions = staticmethod(importlib.machinery.PathFinder.find_distributions)
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names and not top.startswith("_"):
            return None
        specs = (finder.find_spec(name, path, target) for finder in FINDERS)
        return next((spec for spec in specs if spec is not None), None)
FINDERS, sys.meta_path[:] = tuple(sys.meta_path), [Allowed()]
"""


def test_the_library_needs_nothing_but_its_dependencies(site: pathlib.Path, tmp_path: pathlib.Path):
    allowed = needed_alone() | {"kvq_jax", "cpu_kernels", "pallas_kernels", "kvq_models"}
    program = (
        f"ALLOWED = {sorted(allowed)}{ALONE}"
        + """
import jax.numpy as jnp
import kvq_jax as kvq
dims = kvq.CacheDims(2, 4, 2, 64, 256)
cache = kvq.init_cache(kvq.InnerQ(bits=2), dims, batch=1, capacity=256)
step = kvq.begin(cache, 1, prefill=False)
q, k = (jnp.ones((1, heads, 1, 64)) for heads in (4, 2))
for _ in range(2):
    out, step = kvq.append_and_attend(step, q, k, k)
kvq.files.save(kvq.finish(step), "cache.safetensors")
print(kvq.files.load("cache.safetensors").lengths, kvq.size.nbytes(cache), out.shape)
try:
    from kvq_models import load_llama
except ModuleNotFoundError as error:
    print(error)
"""
    )
    printed = run(program, site, tmp_path)
    assert "[1]" in printed
    assert "(1, 4, 1, 64)" in printed
    assert re.search(r"kvq_models needs \w+: pip install 'kvq-jax\[models\]'", printed)


def test_the_command_names_its_extra(site: pathlib.Path, tmp_path: pathlib.Path):
    allowed = needed_alone() | {"kvq_jax", "cpu_kernels", "pallas_kernels", "kvq_models"}
    program = (
        f"ALLOWED = {sorted(allowed | {'kvq_tools'})}{ALONE}"
        + """
from kvq_tools.cli import process
sys.stderr, sys.argv = sys.stdout, ["kvq", "demo"]
try:
    process.run()
except SystemExit as done:
    print("status", done.code)
"""
    )
    printed = run(program, site, tmp_path)
    assert re.search(r"^kvq needs \w+: pip install 'kvq-jax\[tools\]'$", printed, re.MULTILINE)
    assert "status 1" in printed


def test_importing_the_library_takes_little_more_than_importing_jax(
    site: pathlib.Path, tmp_path: pathlib.Path
):
    """In CPU time, of the fastest of a few runs with compiled bytecode."""
    program = """
import compileall, os, subprocess, sys
compileall.compile_dir(os.environ["PYTHONPATH"], quiet=2)
timed = '''
import time
start = time.process_time()
import jax, jax.numpy
between = time.process_time()
import kvq_jax as kvq; kvq.init_cache; kvq.append_and_attend; kvq.finish
print(between - start, time.process_time() - between)
'''
runs = [
    subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout
    for _ in range(3)
]
print(*(min(times) for times in zip(*(map(float, run.split()) for run in runs))))
"""
    jax_alone, library = map(float, run(program, site, tmp_path).split())
    assert 0 < library < 0.3 * jax_alone, f"JAX {jax_alone:.3f} s, then kvq_jax {library:.3f} s"


def test_the_library_weighs_at_most_22_mb_beside_jax(site: pathlib.Path):
    """With bytecode, as pip installs it, and 3 MB for the kernels, which this wheel has larger
    because it does not optimize them."""
    compileall.compile_dir(site, quiet=2)
    files = [file for file in site.rglob("*") if file.is_file() and file.suffix != ".so"]
    ours = 3e6 + sum(file.stat().st_size for file in files)
    of_jax = {"jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy"}
    beside = needed_alone() - of_jax
    assert len(beside) >= 3, "jaxtyping, safetensors and filelock are counted"
    theirs = sum(
        pathlib.Path(file.locate()).stat().st_size
        for name in beside
        for file in importlib.metadata.files(name) or ()
    )
    assert 8e6 < ours + theirs < 22e6, f"{ours / 1e6:.1f} MB and {theirs / 1e6:.1f} MB"
