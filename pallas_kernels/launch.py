"""The options that kernels are launched with. This module needs no Pallas: kernels are imported
when they are asked for."""

from __future__ import annotations

import dataclasses
from typing import Literal

Arithmetic = Literal["jnp", "asm"]

# Of kernels that are called directly. Inline assembly halves the instructions of a loop
# (docs/kernels.md), but only the emulator of the tests interprets it, and that is no GPU: caches
# are read by it where the machine's self-test has passed (self_test.py).
DEFAULT_ARITHMETIC: Arithmetic = "jnp"


@dataclasses.dataclass(frozen=True)
class Launch:
    """The options that kernels run with. They change the speed, and results only by rounding.

    arithmetic: "asm" computes on pairs of fp16 with inline assembly, "jnp" writes the same with
    array operations.
    interpret: evaluate the kernel with JAX on any backend, for tests.
    """

    arithmetic: Arithmetic = DEFAULT_ARITHMETIC
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.arithmetic not in ("jnp", "asm"):
            raise ValueError(f"arithmetic={self.arithmetic!r}: choose 'jnp' or 'asm'")
        if self.interpret and self.arithmetic == "asm":
            raise ValueError(
                "interpret=True cannot run arithmetic='asm': inline assembly needs a GPU"
            )

    @property
    def asm(self) -> bool:
        return self.arithmetic == "asm"


LAUNCH = Launch()
