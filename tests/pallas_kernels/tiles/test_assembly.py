"""The checks of whole kernels in assembly depend on every instruction.

Emulated launches (harness.py) pass the checks of array operations: each instruction is executed in
NumPy (emulator.py), the rest by JAX. A GPU adds only the compiler's part: registers, memory, and
approximate exponentials.
"""

from collections.abc import Callable

import pytest

from tests.exhaustive import some
from tests.pallas_kernels.emulator import INSTRUCTIONS
from tests.pallas_kernels.harness import EMULATED, check_attention
from tests.pallas_kernels.kernel_cases import CASES, CODEBOOK, POLAR, TABLES
from tests.pallas_kernels.test_mosaic_polar import OF_MIDDLES

pytestmark = pytest.mark.usefixtures("assembler")


def attention(id: str) -> Callable[[], None]:
    case = CASES[id]
    return lambda: check_attention(case, case.short, case.tuning, EMULATED)


CHECKED: dict[str, Callable[[], None]] = {
    **dict.fromkeys(
        (
            "lop3.b32",
            "shr.b32",
            "shl.b32",
            "add.rn.f16x2",
            "mul.rn.f16x2",
            "fma.rn.f32",
            "ex2.approx.ftz.f32",
        ),
        attention("innerq1_sym_h128_g4"),
    ),
    "fma.rn.f16x2": attention("kivi4_h128_g7_size32"),
    **dict.fromkeys(("prmt.b32", "and.b32"), attention(TABLES[0].id)),
    "neg.f16x2": attention(CODEBOOK[0].id),
    **dict.fromkeys(("cos.approx.ftz.f32", "sin.approx.ftz.f32"), attention(POLAR[0].id)),
}
# one of each check: the others are seen by the same comparison
SEEN = ("lop3.b32", "fma.rn.f16x2", "prmt.b32", "neg.f16x2", "cos.approx.ftz.f32")
# constants, and the 0 of `table_lookup.in_registers`
PLAIN = {"mov.b32", "mov.u32", "add.u32", "shr.u32"}


@pytest.mark.parametrize("instruction", some(CHECKED, SEEN))
def test_an_instruction_that_computes_something_else_is_noticed(instruction, monkeypatch):
    """Negative control: emulated launches depend on every instruction of a kernel."""
    right = INSTRUCTIONS[instruction]
    monkeypatch.setitem(INSTRUCTIONS, instruction, lambda first, *more: right(~first, *more))
    with pytest.raises(AssertionError):
        CHECKED[instruction]()


def test_every_instruction_has_its_control():
    assert set(CHECKED) | PLAIN | set(OF_MIDDLES) == set(INSTRUCTIONS)
