"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and their threads under
ThreadSanitizer, in programs without XLA or Python.

The instructions of AVX-512 are loops there, so every processor of x86 checks all kernels of x86.
"""

import concurrent.futures
import functools
import os
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator

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


AVX2 = "-mavx2", "-mfma", "-mf16c"
# The choice among kernels takes those of AVX-512, whose instructions are loops here.
EMULATED = "-Wno-psabi", "-include", str(pathlib.Path(__file__).with_name("emulated_avx512.h"))
EVERY_PROCESSOR = "-DKVQ_AVX2", "-DKVQ_AVX512", "-DKVQ_VNNI", "-D__builtin_cpu_supports(x)=1"
COMMON = "split", "prompt_call", "weights_call", "tasks", "attention_baseline", "weights_baseline"

X86 = platform.machine().lower() in ("x86_64", "amd64")
PROCESSORS = ("native", "avx512") if X86 else ("native",)
# Those of attention take longest, and with the kernels of AVX-512 they run those of AVX2, too.
ATTENTION, PRODUCTS = (
    {"driver": "376 layouts", "prompt_driver": "120 prompts"},
    {"weights_driver": "315 products", "tables_driver": "216 products"},
)
PROGRAMS = [
    *((name, read, PROCESSORS[-1]) for name, read in ATTENTION.items()),
    *((name, read, one) for name, read in PRODUCTS.items() for one in PROCESSORS),
]

Build = Callable[[str, str], pathlib.Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Return a function that links a program of this folder with the kernels: those that this
    processor takes unless it has AVX-512 ("native"), or those of AVX-512 ("avx512")."""
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

    def made(output: str, *arguments: str) -> str:
        subprocess.run([compiler, *SANITIZED, *arguments, "-o", output], check=True)
        return output

    threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())

    @functools.cache
    def compiled(
        source: pathlib.Path, *flags: str, name: str = ""
    ) -> concurrent.futures.Future[str]:
        output = str(folder / f"{name or source.stem}.o")
        return threads.submit(made, output, *flags, "-c", str(source))

    @functools.cache
    def linked(program: str, processor: str) -> pathlib.Path:
        objects, chosen = [], ["-DKVQ_AVX2"] if X86 else []
        if processor == "avx512":  # the longest first
            chosen = [*EVERY_PROCESSOR]
            for name in ("attention_avx512", "weights_avx512", "weights_vnni"):
                objects.append(compiled(SOURCES / f"{name}.cc", *AVX2, *EMULATED))
        if X86:
            for name in ("attention_avx2", "weights_avx2"):
                objects.append(compiled(SOURCES / f"{name}.cc", *AVX2))
        objects += [compiled(SOURCES / f"{name}.cc") for name in COMMON]
        objects.append(compiled(SOURCES / "processors.cc", *chosen, name=f"processors_{processor}"))
        # a plain loop over all entries takes most of the time
        objects.append(compiled(pathlib.Path(__file__).with_name(f"{program}.cc"), "-O1"))
        parts = [part.result() for part in objects]
        return pathlib.Path(made(str(folder / f"{program}_{processor}"), *parts))

    with threads:
        yield linked


@pytest.mark.parametrize(("name", "read", "processor"), PROGRAMS)
def test_nothing_is_read_outside_its_arrays_and_all_kernels_agree(
    build: Build, name: str, read: str, processor: str
):
    done = subprocess.run([build(name, processor)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    told = done.stdout.splitlines()[-1]
    assert told.startswith(read)
    assert processor == "native" or "kernel avx512" in told


def test_the_sanitizer_finds_one_entry_too_many(build: Build):
    program = build("driver", PROCESSORS[-1])
    done = subprocess.run([program, "overrun"], capture_output=True, text=True, check=False)
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
    assert done.stdout == "8000 calls, 0 tasks that did not run once, 3 of 3 helpers\n"
    racing = subprocess.run([program, "race"], capture_output=True, text=True, check=False)
    assert "data race" in racing.stderr, "the sanitizer does not find a race"
