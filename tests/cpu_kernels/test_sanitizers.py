"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and their threads under
ThreadSanitizer, in programs without XLA or Python.
"""

import functools
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Callable

import pytest

SOURCES = pathlib.Path(__file__).parents[2] / "cpu_kernels" / "csrc"
SANITIZED = (
    "-std=c++17",
    "-O0",
    "-g1",
    "-fsanitize=address,undefined",
    # AddressSanitizer stops what these announce, and they take a third of the compilation
    "-fno-sanitize=null,object-size,pointer-overflow",
    "-fno-sanitize-recover=all",
    "-pthread",
    f"-I{SOURCES}",
)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Return a function that links a program of this folder with the kernels."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler is on the PATH")
    folder = tmp_path_factory.mktemp("driver")
    probe = subprocess.run(
        [compiler, *SANITIZED, "-x", "c++", "-", "-o", str(folder / "probe")],
        input=b"int main() {}",
        check=False,
    )
    if probe.returncode or subprocess.run([folder / "probe"], check=False).returncode:
        pytest.skip("this compiler's sanitizers do not work here")
    avx2 = platform.machine().lower() in ("x86_64", "amd64")
    parts: dict[str, list[str]] = {
        name: [] for name in ("split", "prompt_call", "weights_call", "tasks")
    }
    parts |= {"processors": ["-DKVQ_AVX2"] if avx2 else []}
    for kind in ("attention", "weights"):
        parts[f"{kind}_baseline"] = []
        if avx2:
            parts[f"{kind}_avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    objects = [str(folder / f"{name}.o") for name in parts]
    for (name, flags), output in zip(parts.items(), objects, strict=True):
        subprocess.run(
            [compiler, *SANITIZED, *flags, "-c", str(SOURCES / f"{name}.cc"), "-o", output],
            check=True,
        )

    @functools.cache
    def linked(name: str) -> pathlib.Path:
        source, program = pathlib.Path(__file__).with_name(f"{name}.cc"), folder / name
        # a plain loop over all entries takes most of the time
        command = [compiler, *SANITIZED, "-O1", str(source), *objects, "-o", str(program)]
        subprocess.run(command, check=True)
        return program

    return linked


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("driver", "376 layouts"),
        ("prompt_driver", "120 prompts"),
        ("weights_driver", "315 products"),
        ("tables_driver", "216 products"),
    ],
)
def test_nothing_is_read_outside_its_arrays_and_all_kernels_agree(
    build: Callable[[str], pathlib.Path], name: str, read: str
):
    done = subprocess.run([build(name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert done.stdout.splitlines()[-1].startswith(read)


def test_the_sanitizer_finds_one_entry_too_many(build: Callable[[str], pathlib.Path]):
    done = subprocess.run([build("driver"), "overrun"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_tasks_of_many_calls_run_once_without_a_race(tmp_path: pathlib.Path):
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler is on the PATH")
    program = tmp_path / "tasks_driver"
    flags = ["-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-pthread", f"-I{SOURCES}"]
    probe = [compiler, *flags, "-x", "c++", "-", "-o", str(program)]
    built = subprocess.run(probe, input=b"int main() {}", check=False, capture_output=True)
    if built.returncode or subprocess.run([program], check=False, capture_output=True).returncode:
        pytest.skip("this compiler's ThreadSanitizer does not work here")
    sources = [str(pathlib.Path(__file__).with_name("tasks_driver.cc")), str(SOURCES / "tasks.cc")]
    subprocess.run([compiler, *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert done.stdout == "8000 calls, 0 tasks that did not run once\n"
    racing = subprocess.run([program, "race"], capture_output=True, text=True, check=False)
    assert "data race" in racing.stderr, "the sanitizer does not find a race"
