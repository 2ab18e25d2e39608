"""A kernel whose machine code is watched, with its limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.limits import A100_LIMITS, NEWER, NEWER_LIMITS
from benchmarks.machine_code.report import KernelReport, measure
from benchmarks.machine_code.sass import Function, Loop, main_loop
from benchmarks.machine_code.target import Target

BATCH, KV_HEADS, GROUP, TOKENS = 16, 8, 4, 16384  # Llama 3.1 8B
MAX_REGISTERS = 255  # of a thread, and eight warps on a multiprocessor, for which splits are chosen


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its limits, which hold on every target and with every JAX, but for A100_LIMITS
    and NEWER_LIMITS.

    build: makes the function to compile and its arguments, trees of jax.ShapeDtypeStruct.
    kernel: a regular expression for the whole name of the kernel in it.
    elements_per_iteration: cached elements that a block reads in one iteration of the main loop, K
        and V together, or in all if the kernel has no loop.
    stored_bits: bits of one cached element, with scales and zero points.
    cap_instructions, cap_alu: limits per cached element.
    min_share: least share of the memory limit if every issue slot were filled.
    cap_spill_bytes: limit for a thread in the whole kernel. A few bytes outside of the loop cost
        nothing.
    mma_columns: query heads, padded, that each cached element is multiplied with, or None if a warp
        repeats work or a kernel multiplies no matrices.
    part: returns the instructions that are counted.
    """

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    kernel: str
    elements_per_iteration: int
    stored_bits: float
    cap_instructions: float
    cap_alu: float
    min_share: float
    plain_loads_allowed: bool = False
    loop_spills_allowed: bool = False
    cap_spill_bytes: int = 64
    mma_columns: float | None = 8
    part: Callable[[Function], Loop] = main_loop

    def measure(self, target: Target) -> KernelReport:
        """Compile the case and measure its kernel, which takes seconds."""
        function, arguments = self.build()
        kernel = compile_for(target, function, arguments).kernel(self.kernel)
        return measure(
            self.name,
            kernel,
            target,
            elements_per_iteration=self.elements_per_iteration,
            stored_bits=self.stored_bits,
            part=self.part,
        )

    def failures(self, report: KernelReport) -> list[str]:
        """Return the limits that a report breaks, in words."""
        exceptions = A100_LIMITS.get(self.name, {}) if report.target == "a100" else {}
        if jax.__version_info__ >= NEWER:
            exceptions = exceptions | NEWER_LIMITS.get(self.name, {})
        return dataclasses.replace(self, **exceptions)._failures(report)

    def _failures(self, report: KernelReport) -> list[str]:
        instructions, alu, columns = (
            report.instructions_per_element,
            report.alu_per_element,
            report.mma_columns,
        )
        checks = (
            (
                f"{instructions:.2f} instructions per element, at most {self.cap_instructions}",
                instructions > self.cap_instructions,
            ),
            (
                f"{alu:.2f} integer operations and conversions per element, at most {self.cap_alu}",
                alu > self.cap_alu,
            ),
            (
                f"{report.bound:.0%} of the memory limit, at least {self.min_share:.0%}",
                report.bound < self.min_share,
            ),
            (
                f"{report.plain_loads} loads in the loop that are not asynchronous",
                report.plain_loads and not self.plain_loads_allowed,
            ),
            (
                f"{report.loop_spills} spills in the loop",
                report.loop_spills and not self.loop_spills_allowed,
            ),
            (
                f"{report.spill_bytes} bytes spilled, at most {self.cap_spill_bytes}",
                report.spill_bytes > self.cap_spill_bytes,
            ),
            (
                f"{report.registers} registers, at most {MAX_REGISTERS}",
                report.registers > MAX_REGISTERS,
            ),
            (
                (
                    f"{columns:g} multiply-adds per element, not {self.mma_columns}: is"
                    f" {self.elements_per_iteration=} what the loop reads?"
                ),
                self.mma_columns is not None and columns != self.mma_columns,
            ),
        )
        return [f"{self.name} on {report.target}: {line}" for line, broken in checks if broken]
