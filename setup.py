"""Compile the C++ kernels of cpu_kernels, if there is a compiler. The rest is in pyproject.toml.

Without a compiler, or if compilation fails, kvq is still installed, runs on XLA, and `kvq doctor`
says so. Nothing is compiled later. In a checkout run `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = pathlib.Path("cpu_kernels/csrc")
FILES = runpy.run_path("cpu_kernels/sources.py")
OBJECTS = pathlib.Path("build/objects")  # shared by the environments that a checkout has
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread")
CALLS = (
    *("tasks", "split", "store", "prompt_call", "prompt_ffi"),
    *("weights_call", "weights_ffi", "tables_ffi"),
)
KERNELS = "attention", "weights"
AVX512 = "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"
# Kernels are compiled once for each kind of processor, and the choice is made at run time
# (csrc/processors.cc).
PROCESSORS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512,
    "vnni": (*AVX512, "-mavx512vnni"),  # products with weights alone
}


def compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX, or the first on the PATH. Raises
    FileNotFoundError if there is none.
    """
    if chosen := flags_of("CXX"):
        if not (path := shutil.which(chosen[0])):
            raise FileNotFoundError(f"{chosen[0]}, which $CXX names, is not on the PATH")
        return [path, *chosen[1:]]
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise FileNotFoundError("no C++ compiler (c++, g++ or clang++) is on the PATH")


def flags_of(*names: str) -> list[str]:
    """Return the words of environment variables."""
    return [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]


def headers() -> pathlib.Path:
    """Return the folder of XLA's headers, from the environment that kvq is installed into, or from
    the one that builds it.

    A handler compiled with older headers runs in a newer JAX, but not the other way round.
    """
    places = [pathlib.Path(sysconfig.get_path(name)) for name in ("platlib", "purelib")] + [
        pathlib.Path(p) for p in sys.path if p
    ]
    for place in places:
        if (place / "jaxlib/include/xla/ffi/api/ffi.h").is_file():
            return place / "jaxlib/include"
    raise FileNotFoundError("no jaxlib with XLA's headers is installed")


def object_file(
    program: list[str], flags: list[str], includes: pathlib.Path, source: pathlib.Path
) -> pathlib.Path:
    """Return the object file of `source`, compiled if no earlier installation left it.

    Its name has a hash of the command, the compiler's version and the preprocessed source: most
    sources use nothing of XLA, and are the same for every Python and JAX.
    """

    def output(*arguments: str) -> str:
        return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout

    version, call = output(*program, "--version"), [*program, *flags, "-isystem", str(includes)]
    parts = [*program, *flags, version, output(*call, "-E", "-P", str(source))]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = OBJECTS / f"{source.stem}-{name}.o"
    if not target.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=OBJECTS) as folder:  # others may compile it as well
            output(*call, "-c", str(source), "-o", f"{folder}/object")
            os.replace(f"{folder}/object", target)
    return target


class BuildKernels(build_ext):
    """Compile the kernels if that is possible."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # kvq works without the kernels, whatever the error is
            self.warn(f"cpu_kernels was not compiled, attention on a CPU will run on XLA: {error}")

    def build_extension(self, ext: Extension) -> None:
        try:
            self._compile(pathlib.Path(self.get_ext_fullpath(ext.name)))
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            self.warn(
                "cpu_kernels was not compiled, attention on a CPU will run on XLA:"
                f" {detail.strip()[:2000]}"
            )

    def _compile(self, target: pathlib.Path) -> None:
        program, folder = compiler(), headers()
        common = [*COMMON, *flags_of("CPPFLAGS", "CXXFLAGS", "ARCHFLAGS")]
        with (
            tempfile.TemporaryDirectory() as temporary,
            concurrent.futures.ThreadPoolExecutor() as threads,
        ):

            def compiled(name: str, *flags: str) -> str:
                source = SOURCES / f"{name}.cc"
                return str(object_file(program, [*common, *flags], folder, source))

            processors = PROCESSORS if platform.machine().lower() in ("x86_64", "amd64") else {}
            kernels = {
                name: [
                    threads.submit(compiled, f"{kind}_{name}", *flags)
                    for kind in KERNELS
                    if (SOURCES / f"{kind}_{name}.cc").exists()
                ]
                for name, flags in processors.items()
            }
            objects, defined = [compiled(f"{kind}_baseline") for kind in KERNELS], list[str]()
            for name, parts in kernels.items():
                try:
                    objects += [part.result() for part in parts]
                except subprocess.CalledProcessError as error:  # an old compiler
                    self.warn(f"no kernel for {name}: {error.stderr[:2000]}")
                else:
                    defined.append(f"-DKVQ_{name.upper()}")
            objects += [
                compiled("processors", *defined),
                *map(compiled, CALLS),
                compiled("ffi", f'-DKVQ_SOURCES="{FILES["digest"]()}"'),
            ]
            target.parent.mkdir(parents=True, exist_ok=True)
            linked = f"{temporary}/linked"
            subprocess.run(
                [*program, "-shared", *common, *objects, *flags_of("LDFLAGS"), "-o", linked],
                check=True,
                capture_output=True,
                text=True,
            )
            shutil.copyfile(linked, temporary_beside := f"{target}.new")
            os.replace(temporary_beside, target)  # a process that has loaded the old one keeps it


files = [str(file) for file in FILES["sources"](SOURCES)]
setup(
    ext_modules=[
        Extension(
            "cpu_kernels.native",
            [file for file in files if file.endswith(".cc")],
            depends=[file for file in files if file.endswith(".h")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
