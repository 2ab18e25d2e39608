"""Compare the CPU attention kernel with its bounds: memory bandwidth and the rate of multiplying.

    python -m benchmarks.cpu.roofline --json roofline_cpu.json

The kernel runs alone on one thread, without XLA. It needs a C++ compiler. If valgrind is installed,
it counts instructions, in the variant for AVX2 because it knows no AVX-512.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.progress import progress
from benchmarks.report_file import Report, arguments, header
from cpu_kernels import library
from cpu_kernels.body import Body
from kvq_jax.cache.cache import CacheDims
from kvq_tools.processor import processor_name

SOURCES, PROGRAM = (
    pathlib.Path(library.__file__).parent / "csrc",
    pathlib.Path(__file__).with_name("roofline.cc"),
)
FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}  # as setup.py compiles them
CACHES = (
    "dense",
    "int4",
    "nf4",
    "kivi:bits=4",
    "kivi:bits=2",
    "kivi:bits=4,pre_rope=true",
    "innerq:bits=4",
    "innerq:bits=2",
    "polarquant",
)
COUNTED = 1024  # tokens of a run whose instructions are counted


@dataclasses.dataclass(frozen=True)
class RooflineRow:
    """One cache: bytes that the kernel reads, nanoseconds, and instructions (AVX2), each for an
    element of K or V, or 0 if not counted."""

    cache: str
    head_dim: int
    bytes: float
    ns: float
    instructions: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineReport(Report):
    """kernel: the variant that was timed. lanes: floats of a vector. multiplied: vectors that one
    thread multiplies and adds in a nanosecond, in registers. read_rate: bytes that it reads from
    memory in one. query_rows: of a KV head.
    """

    cpu: str
    kernel: str
    lanes: int
    multiplied: float
    read_rate: float
    query_rows: int
    tokens: int
    rows: tuple[RooflineRow, ...]


def bodies(spec: str, head_dim: int, tokens: int) -> tuple[Body, Body]:
    """Return how the kernel takes keys and values of this cache. Raises ValueError if it cannot
    read them."""
    plan = kvq.parse(spec).layer(0, CacheDims(1, 4, 1, head_dim, 4 * head_dim), tokens, "float32")
    described = [codec.kernels.native() for codec in plan.codecs]
    for body in described:
        if isinstance(body, str):
            raise ValueError(f"{spec}: {body}")
    k, v = (body for body in described if isinstance(body, Body))
    return k, v


def compiler() -> str:
    """Return the path of a C++ compiler. Raises ValueError without one."""
    if path := next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None):
        return path
    raise ValueError("no C++ compiler (c++, g++ or clang++) is on the PATH")


def build(kernel: str, folder: pathlib.Path) -> pathlib.Path:
    """Compile the program with the kernel for these instructions alone. Raises ValueError without a
    compiler, or if it fails."""
    flags = ("-std=c++17", "-O3", "-pthread", f"-I{SOURCES}", *FLAGS.get(kernel, ()))
    parts = [
        SOURCES / f"attention_{kernel if kernel in FLAGS else 'baseline'}.cc",
        *(SOURCES / f"{name}.cc" for name in ("processors", "split", "tasks")),
        PROGRAM,
    ]
    # best_kernels() must choose this variant, so it stands in the place of all
    aliases = [
        f"-Dattend_{part}_{name}=attend_{part}_{kernel}"
        for part in ("tokens", "rows")
        for name in ("baseline", "avx2", "avx512")
        if kernel in FLAGS and name != kernel
    ]
    program = folder / f"roofline_{kernel}"
    done = subprocess.run(
        [compiler(), *flags, *aliases, *map(str, parts), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the benchmark was not compiled: {done.stderr[:2000]}")
    return program


def run(program: pathlib.Path, *words: object) -> list[float]:
    done = subprocess.run([program, *map(str, words)], check=True, capture_output=True, text=True)
    return [float(number) for number in done.stdout.split()]


def instructions(program: pathlib.Path, *words: object) -> int:
    """Return how many instructions the kernel executes in a run of the program, by valgrind."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "counts"
        options = (
            "--tool=callgrind",
            f"--callgrind-out-file={file}",
            "--toggle-collect=kvq::attend(*",
        )
        subprocess.run(
            ["valgrind", *options, program, *map(str, words)], check=True, capture_output=True
        )
        counted = re.search(
            r"^(?:summary|totals): (\d+)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    return int(counted[1]) if counted else 0


def measure(
    spec: str,
    head_dim: int,
    rows: int,
    tokens: int,
    rounds: int,
    program: pathlib.Path,
    counter: pathlib.Path | None,
) -> RooflineRow:
    """Time one cache, and count its instructions if there is a program for that."""
    fields = [",".join(map(str, body.fields())) for body in bodies(spec, head_dim, tokens)]
    seconds, read = run(program, "attend", rounds, rows, tokens, *fields)
    elements = 2 * head_dim * tokens
    counted = instructions(counter, "attend", 1, rows, COUNTED, *fields) if counter else 0
    return RooflineRow(
        spec,
        head_dim,
        read / elements,
        1e9 * seconds / elements,
        counted / (2 * head_dim * COUNTED),
    )


def page(report: RooflineReport, file: pathlib.Path) -> str:
    said = (
        f"{report.cpu}, one thread, the kernel for {report.kernel}: {report.multiplied:.2f} vectors"
        f" of {report.lanes} floats multiplied and added in a nanosecond, {report.read_rate:.1f}"
        " bytes read from memory."
    )
    legend = (
        f"{report.tokens} tokens of one KV head with {report.query_rows} query rows, without"
        " windows, XLA or other threads. For each element of K or V: bytes that are read, and the"
        " nanoseconds that these take at the rate above; nanoseconds that the multiplications by"
        " all query rows take at theirs, the least that any kernel in fp32 needs; what was"
        " measured, the fastest of many runs, and its ratio to the larger of the two, below 1"
        " where the bytes fit the processor's cache. Instructions are those of the variant for"
        " AVX2, whose vectors hold 8 floats."
    )
    of_rows = report.query_rows / report.lanes / report.multiplied
    lines = []
    for row in report.rows:
        of_bytes = row.bytes / report.read_rate
        counted = f"{row.instructions:.2f}" if row.instructions else "-"
        numbers = (
            f"{row.bytes:.2f}",
            f"{of_bytes:.3f}",
            f"{of_rows:.3f}",
            f"{row.ns:.3f}",
            f"{row.ns / max(of_bytes, of_rows):.1f}",
            counted,
        )
        lines.append((str(row.head_dim), row.cache, *numbers))
    columns = (
        "head dim",
        "cache",
        "bytes",
        "ns of bytes",
        "ns of products",
        "measured ns",
        "ratio",
        "instructions",
    )
    return "\n\n".join([*head(report, file, said), legend, table(columns, lines)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.roofline",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--cache", metavar="SPEC", nargs="+", default=CACHES, help="caches to measure"
    )
    parser.add_argument(
        "--head-dim", type=int, nargs="+", default=(64, 128), metavar="H", help="channels of a head"
    )
    parser.add_argument("--rows", type=int, default=4, metavar="R", help="query rows of a KV head")
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of the body, a multiple of 1024",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=400,
        metavar="M",
        help="runs of each, of which the fastest counts",
    )
    parser.add_argument(
        "--no-instructions",
        action="store_true",
        help="count no instructions, which takes valgrind seconds for each cache",
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers here")
    args = parser.parse_args(argv)
    kernel = library.instruction_set() or "baseline"
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = build(kernel, pathlib.Path(folder))
            counts = not args.no_instructions and shutil.which("valgrind") and kernel in FLAGS
            counter = build("avx2", pathlib.Path(folder)) if counts else None
            lanes, multiplied, read = run(program, "limits")
            rows = []
            for head_dim in args.head_dim:
                for spec in args.cache:
                    rows.append(
                        measure(
                            spec, head_dim, args.rows, args.tokens, args.rounds, program, counter
                        )
                    )
                    progress(f"{rows[-1]}")
        except ValueError as error:
            parser.exit(2, f"{error}\n")
    report = RooflineReport(
        title="The CPU kernel against its bounds",
        **header(("benchmarks.cpu.roofline", *arguments(argv))),
        cpu=processor_name(),
        kernel=kernel,
        lanes=int(lanes),
        multiplied=multiplied,
        read_rate=read,
        query_rows=args.rows,
        tokens=args.tokens,
        rows=tuple(rows),
    )
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()
