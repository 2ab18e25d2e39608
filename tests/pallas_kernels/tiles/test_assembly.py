"""Whole kernels in assembly, interpreted: each instruction is executed in NumPy (emulator.py), the
rest by JAX. They pass the very checks that array operations pass. What a GPU adds to this is the
compiler's part: registers, memory, and approximate exponentials.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.pallas_kernels.decode_attention import test_decode, test_matvec, test_windows
from tests.pallas_kernels.emulator import INSTRUCTIONS, Emulated
from tests.pallas_kernels.kernel_cases import CASES, kernel_cases
from tests.pallas_kernels.quantize import test_append, test_quantize
from tests.pallas_kernels.readers import test_codebook, test_polar
from tests.pallas_kernels.tiles import test_table_lookup

pytestmark = pytest.mark.usefixtures("assembler")
ASSEMBLY = Emulated()
BEFORE_ROPE = next(case for case in test_codebook.CASES if case.k.pre_rope)


@kernel_cases(
    "innerq1_sym_h128_g4",
    "innerq4_hybrid_h64_g4",
    "innerq8_asym_h128_g4",
    "kivi2_h64_g8_size64",
    "kivi4_h128_g7_size32",
    "k3_v4",
)
def test_attention_over_groups_equals_the_reference(case):
    """Codes of 2, 3, 4, 5 and 8 bits, in groups over channels and over tokens."""
    test_decode.check_lengths(case, test_decode.SHORT, test_decode.tuned(2), ASSEMBLY)


@pytest.mark.parametrize("case", test_codebook.CASES[:3], ids=lambda case: case.id)
def test_attention_over_tables_and_keys_before_rope_equals_the_reference(case):
    test_codebook.check_attention(case, test_codebook.SHORT, test_codebook.TUNING, ASSEMBLY)


@pytest.mark.parametrize("case", test_polar.CASES[:2], ids=lambda case: case.id)
def test_attention_over_keys_in_polar_form_equals_the_reference(case):
    test_polar.check_lengths(case, test_polar.tuned(64, 2), ASSEMBLY)


@pytest.mark.parametrize("case", test_table_lookup.CASES[::2], ids=lambda case: case.id)
def test_products_over_tables_equal_the_reference(case):
    test_table_lookup.check_scores(case, ASSEMBLY)
    test_table_lookup.check_values(case, ASSEMBLY)


@kernel_cases("innerq1_sym_h128_g4", "kivi2_h64_g8_size64")
def test_products_equal_the_reference(case):
    test_matvec.check_scores(case, test_matvec.CAPACITY, test_matvec.TUNING, ASSEMBLY)
    test_matvec.check_values(case, test_matvec.CAPACITY, test_matvec.TUNING, ASSEMBLY)


@test_quantize.each(*test_quantize.CASES[:3], test_quantize.CASES[11])
def test_quantized_rows_are_those_of_quantize(case):
    rows, divisor = test_quantize.special_rows(case), test_quantize.divisor_of(case)
    found, wanted = (
        test_quantize.fused(case, rows, divisor, ASSEMBLY),
        test_quantize.reference(case, rows, divisor),
    )
    codes = test_quantize.wanted_codes(case, rows, divisor, wanted)
    assert (wrong := test_quantize.disagreement(case, found, wanted, codes)) is None, wrong


@test_windows.before_or_after_rope
def test_attention_to_windows_is_that_of_their_tokens(rotation):
    test_windows.check(test_windows.SIZES[1], rotation, ASSEMBLY)


@pytest.mark.parametrize(
    "case", [test_quantize.CASES[0], test_quantize.CASES[7]], ids=lambda case: case.id
)
def test_a_block_is_appended_as_it_is_quantized(case):
    test_append.check_blocks(case, ASSEMBLY)


def attention(name: str) -> None:
    [case] = [case for case in CASES if case.id == name]
    test_decode.check_lengths(case, test_decode.SHORT, test_decode.tuned(2), ASSEMBLY)


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
        lambda: attention("innerq1_sym_h128_g4"),
    ),
    "fma.rn.f16x2": lambda: attention("kivi4_h128_g7_size32"),
    **dict.fromkeys(
        ("prmt.b32", "and.b32"),
        lambda: test_table_lookup.check_scores(test_table_lookup.CASES[0], ASSEMBLY),
    ),
    "neg.f16x2": lambda: test_codebook.check_attention(
        BEFORE_ROPE, test_codebook.SHORT, test_codebook.TUNING, ASSEMBLY
    ),
    **dict.fromkeys(
        ("cos.approx.ftz.f32", "sin.approx.ftz.f32"),
        lambda: test_polar.check_lengths(test_polar.CASES[0], test_polar.tuned(64, 2), ASSEMBLY),
    ),
}
PLAIN = {
    "mov.b32",
    "mov.u32",
    "add.u32",
    "shr.u32",
}  # constants, and the 0 of `table_lookup.in_registers`


@pytest.mark.parametrize("instruction", CHECKED)
def test_an_instruction_that_computes_something_else_is_noticed(instruction, monkeypatch):
    """Negative control: the checks above see every instruction of a kernel."""
    right = INSTRUCTIONS[instruction]
    monkeypatch.setitem(INSTRUCTIONS, instruction, lambda first, *more: right(~first, *more))
    with pytest.raises(AssertionError):
        CHECKED[instruction]()


def test_every_instruction_has_its_control():
    assert set(CHECKED) | PLAIN == set(INSTRUCTIONS)
