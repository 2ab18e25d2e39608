"""Whole kernels in assembly pass the same checks as array operations.

Each instruction is executed in NumPy (emulator.py), the rest by JAX. A GPU adds only the compiler's
part: registers, memory, and approximate exponentials.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exhaustive import some
from tests.pallas_kernels.decode_attention import test_windows
from tests.pallas_kernels.emulator import INSTRUCTIONS, Emulated
from tests.pallas_kernels.harness import check_attention, check_scores, check_values, tuned
from tests.pallas_kernels.kernel_cases import CASES, CODEBOOK, POLAR, RUNS, TABLES, each, named
from tests.pallas_kernels.quantize import test_append, test_quantize

pytestmark = pytest.mark.usefixtures("assembler")
ASSEMBLY = Emulated()
# tables of every width with scales of tokens and of channels, outliers, keys before RoPE and in
# polar form, runs
OTHERS = (*CODEBOOK[:3], *POLAR[:2], *RUNS[:4])


@named(
    "innerq1_sym_h128_g4",
    "innerq8_asym_h128_g4",
    "kivi2_h64_g8_size64",
    "kivi4_h128_g7_size32",
    "k3_v4",
)
def test_attention_over_groups_equals_the_reference(case):
    """Codes of 2, 3, 4, 5 and 8 bits, in groups over channels and over tokens."""
    check_attention(case, case.short, case.tuning, ASSEMBLY)


@each(OTHERS, [case.id for case in OTHERS if case not in (RUNS[1], RUNS[3])])
def test_attention_over_other_formats_equals_the_reference(case):
    check_attention(case, case.short, case.tuning, ASSEMBLY)


@pytest.mark.parametrize(
    "case",
    [CASES["innerq1_sym_h128_g4"], CASES["kivi2_h64_g8_size64"], *TABLES[::3]],
    ids=lambda case: case.id,
)
def test_products_equal_the_reference(case):
    check_scores(case, tuning=tuned(1, 128, 1), launch=ASSEMBLY)
    check_values(case, tuning=tuned(1, 128, 1), launch=ASSEMBLY)


@test_quantize.each(*test_quantize.CASES[:3], test_quantize.CASES[11])
def test_quantized_rows_are_those_of_quantize(case):
    rows, divisor = test_quantize.special_rows(case), test_quantize.divisor_of(case)
    packed = test_quantize.fused(case, rows, divisor, ASSEMBLY)
    expected = test_quantize.reference(case, rows, divisor)
    codes = test_quantize.expected_codes(case, rows, divisor, expected)
    assert (wrong := test_quantize.disagreement(case, packed, expected, codes)) is None, wrong


@test_windows.before_or_after_rope
def test_attention_to_windows_is_that_of_their_tokens(rotation):
    test_windows.check(test_windows.SIZES[1], rotation, ASSEMBLY)


@pytest.mark.parametrize(
    "case", [test_quantize.CASES[0], test_quantize.CASES[7]], ids=lambda case: case.id
)
def test_a_block_is_appended_as_it_is_quantized(case):
    test_append.check_blocks(case, ASSEMBLY)


def attention(id: str) -> Callable[[], None]:
    case = CASES[id]
    return lambda: check_attention(case, case.short, case.tuning, ASSEMBLY)


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
    **dict.fromkeys(
        ("prmt.b32", "and.b32"),
        lambda: check_scores(TABLES[0], tuning=tuned(1, 128, 1), launch=ASSEMBLY),
    ),
    "neg.f16x2": attention(CODEBOOK[0].id),
    **dict.fromkeys(("cos.approx.ftz.f32", "sin.approx.ftz.f32"), attention(POLAR[0].id)),
}
# one of each check: the others are seen by the same comparison
SEEN = ("lop3.b32", "fma.rn.f16x2", "prmt.b32", "neg.f16x2", "cos.approx.ftz.f32")
# constants, and the 0 of `table_lookup.in_registers`
PLAIN = {"mov.b32", "mov.u32", "add.u32", "shr.u32"}


@pytest.mark.parametrize("instruction", some(CHECKED, SEEN))
def test_an_instruction_that_computes_something_else_is_noticed(instruction, monkeypatch):
    """Negative control: the checks above depend on every instruction of a kernel."""
    right = INSTRUCTIONS[instruction]
    monkeypatch.setitem(INSTRUCTIONS, instruction, lambda first, *more: right(~first, *more))
    with pytest.raises(AssertionError):
        CHECKED[instruction]()


def test_every_instruction_has_its_control():
    assert set(CHECKED) | PLAIN == set(INSTRUCTIONS)
