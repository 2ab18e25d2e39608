"""Options for launching kernels. This module needs no Pallas, so kernels are imported only when
they are used.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Arithmetic = Literal["jnp", "asm"]
KernelRoute = Literal["triton", "mosaic"]

# The default for kernels that are called directly. Inline assembly halves the instructions of a
# loop (docs/kernels.md), but the only interpreter for it is the tests' emulator, which is not a
# GPU. A cache is read with assembly only if the machine has passed its self-test (self_test.py).
DEFAULT_ARITHMETIC: Arithmetic = "jnp"


@dataclasses.dataclass(frozen=True)
class Launch:
    """Options that change a kernel's speed, and its results only by rounding.

    Args:
        arithmetic: "asm" computes on pairs of fp16 with inline assembly, "jnp" does the same with
            array operations.
        interpret: evaluate the kernel with JAX on any backend, for tests.
        route: the compiler of kernels that have two, "triton" or "mosaic". Bodies that Mosaic GPU
            does not read (mosaic/route.py) take Triton's.
    """

    arithmetic: Arithmetic = DEFAULT_ARITHMETIC
    interpret: bool = False
    route: KernelRoute = "triton"

    def __post_init__(self) -> None:
        if self.arithmetic not in ("jnp", "asm"):
            raise ValueError(f"arithmetic={self.arithmetic!r}: choose 'jnp' or 'asm'")
        if self.route not in ("triton", "mosaic"):
            raise ValueError(f"route={self.route!r}: choose 'triton' or 'mosaic'")
        if self.interpret and self.arithmetic == "asm":
            raise ValueError(
                "interpret=True cannot run arithmetic='asm': inline assembly needs a GPU"
            )

    @property
    def asm(self) -> bool:
        return self.arithmetic == "asm"


LAUNCH = Launch()
