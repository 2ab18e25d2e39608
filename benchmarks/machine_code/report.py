"""The cost of a kernel's main loop on a target: rows, their file and their page."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kvq_jax as kvq
from benchmarks.machine_code.compile import Kernel
from benchmarks.machine_code.sass import Function, Loop, assemble, main_loop
from benchmarks.machine_code.target import BY_NAME, ISSUED, Target
from benchmarks.machine_code.tools import ptxas_version
from benchmarks.markdown import head, table
from benchmarks.report_file import DERIVED, Report, header

DERIVED_NUMBERS = ("instructions_per_element", "alu_per_element", "mma_columns", "budget", "share")
HEADER = (
    *(
        "kernel",
        "target",
        "bits",
        "instr/el",
        "ALU",
        "mma",
        "lds",
        "ldg",
        "shfl",
        "budget",
        "share of limit",
    ),
    *("plain loads", "registers", "spill B (in loop)", "shared KB", "warps/SM"),
)


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One kernel on one target. "Per element" is per cached element (one channel of one token's K
    or V), counted in instructions of a lane.

    threads: of a block. loop: instructions of a warp in one iteration of the main loop, by class.
    loop_spills: those that move spilled registers. plain_loads: those that load global memory into
    registers and so wait for it. loop_multiply_adds: of the block's matrix instructions in one
    iteration. elements_per_iteration: cached elements that a block reads in one. stored_bits: of
    one cached element, with scales and zero points.
    """

    name: str
    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    warps_per_sm: int
    loop: dict[str, int]
    loop_spills: int
    plain_loads: int
    loop_multiply_adds: int
    elements_per_iteration: int
    stored_bits: float

    @property
    def loop_instructions(self) -> int:
        return sum(self.loop.values())

    @property
    def instructions_per_element(self) -> float:
        return self.loop_instructions * self.threads / self.elements_per_iteration

    def per_element(self, *kinds: str) -> float:
        """Return the instructions of these classes (sass.CLASSES) per element."""
        return (
            sum(self.loop.get(kind, 0) for kind in kinds)
            * self.threads
            / self.elements_per_iteration
        )

    @property
    def alu_per_element(self) -> float:
        """Return the integer operations and conversions per element, which run at half the rate of
        issue."""
        return self.per_element("int", "cvt")

    @property
    def mma_columns(self) -> float:
        """Multiply-adds per element: the (padded) query heads that the matrix instructions see. If
        this is not the kernel's own number, the loop does not read elements_per_iteration
        elements."""
        return self.loop_multiply_adds / self.elements_per_iteration

    @property
    def budget(self) -> float:
        """Return the instructions per element that memory at full speed leaves time for."""
        return BY_NAME[self.target].budget(self.stored_bits)

    @property
    def bound(self) -> float:
        """Return budget / max(instructions, 2 ALU) of the loop alone: the share of the memory
        limit, or how often it is reached, if every issue slot were filled."""
        return self.budget / max(self.instructions_per_element, 2 * self.alu_per_element)

    @property
    def share(self) -> float:
        """Return the predicted share of the memory limit: what ISSUED of the issue slots allow."""
        return min(1.0, ISSUED * self.bound)

    def line(self) -> tuple[str, ...]:
        """Return the cells under HEADER."""
        return (
            named_by_spec(self.name),
            self.target,
            f"{self.stored_bits:g}",
            f"{self.instructions_per_element:.2f}",
            f"{self.alu_per_element:.2f}",
            *(f"{self.per_element(kind):.2f}" for kind in ("mma", "lds", "ldg", "shfl")),
            f"{self.budget:.2f}",
            f"{self.share:.0%}",
            str(self.plain_loads),
            str(self.registers),
            f"{self.spill_bytes} ({self.loop_spills})",
            f"{self.shared_bytes / 1024:.1f}",
            str(self.warps_per_sm),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and under "derived" what follows from them, for readers of the
        file."""
        return dataclasses.asdict(self) | {
            DERIVED: {name: round(getattr(self, name), 4) for name in DERIVED_NUMBERS}
        }


def named_by_spec(name: str) -> str:
    """Return the name of a kernel with the spec of its cache instead of the bits of a code, or the
    name itself if no spec asks for this kernel.

    Codes of InnerQ's symmetric and hybrid groups hold a sign that `bits` leaves out: 2-bit
    symmetric codes belong to bits=1.
    """
    named = _CACHE.search(name)
    if named is None:
        return name
    kind, bits, scheme = named["kind"], int(named["bits"]), named["scheme"]
    spec = f"{'kivi' if kind == 'kivi' else 'innerq'}:bits={bits - (scheme in ('sym', 'hybrid'))}"
    spec += (
        f",mode={scheme}"
        if scheme in ("sym", "asym")
        else ",pre_rope=true"
        if named["before"]
        else ""
    )
    try:
        kvq.parse(spec)
    except ValueError:
        return name
    kind = "quantize, " if kind == "quantize" else ""
    return f"{name[: named.start()]}{kind}`{spec}`{name[named.end() :]}"


_CACHE = re.compile(
    r"(?P<kind>innerq|kivi|quantize),? (?P<bits>\d)-bit(?:"
    r" (?P<scheme>sym|asym|hybrid))?(?P<before>, before RoPE)?"
)
LEADING = "`innerq:bits=2`"  # the cache that pages begin with


def measure(
    name: str,
    kernel: Kernel,
    target: Target,
    *,
    elements_per_iteration: int,
    stored_bits: float,
    part: Callable[[Function], Loop] = main_loop,
) -> KernelReport:
    """Assemble a compiled kernel and count its main loop, or another part."""
    assembly = assemble(kernel.ptx, kernel.name, target.architecture)
    loop = part(assembly.function)
    counts = loop.counts()
    shared_bytes = kernel.shared_bytes + assembly.shared_bytes
    return KernelReport(
        name=name,
        kernel=kernel.name,
        target=target.name,
        registers=assembly.registers,
        spill_bytes=assembly.spill_bytes,
        shared_bytes=shared_bytes,
        threads=kernel.threads,
        warps_per_sm=target.warps_per_sm(assembly.registers, kernel.threads, shared_bytes),
        loop=counts,
        loop_spills=counts.get("spill", 0),
        plain_loads=loop.plain_loads,
        loop_multiply_adds=loop.multiply_adds * kernel.threads // 32,
        elements_per_iteration=elements_per_iteration,
        stored_bits=stored_bits,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instructions(Report):
    """Kernels, and what counted them: the counts move with the versions."""

    title: str = "Instructions of the GPU kernels"
    ptxas_version: str
    rows: tuple[KernelReport, ...]

    @classmethod
    def of(cls, rows: Iterable[KernelReport], command: Sequence[str]) -> Instructions:
        return cls(**header(command), ptxas_version=ptxas_version(), rows=tuple(rows))

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"rows": [row.to_json() for row in self.rows]}


def page(report: Instructions, file: pathlib.Path) -> str:
    """Render the costs of the kernels' main loops, by target."""
    said = (
        f"ptxas {report.ptxas_version}. Counted in the machine code of each kernel's main loop,"
        " compiled without a GPU: what the instructions allow, not how fast a kernel runs. The"
        f" share of the memory limit is what {ISSUED:.0%} of the issue slots leave of it. Per"
        " element is per cached element, K or V. `innerq:bits=1,mode=sym` has codes of two bits"
        " for three levels: it shows the kernels at their limit, and is no 2-bit cache."
    )
    lines = sorted(
        (row.line() for row in report.rows), key=lambda line: not line[0].startswith(LEADING)
    )
    return "\n\n".join([*head(report, file, said), table(HEADER, lines)])
