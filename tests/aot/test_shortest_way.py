"""A kernel without a loop is counted by its shortest way. Needs only a listing."""

from __future__ import annotations

import pytest

from benchmarks.machine_code import sass
from benchmarks.machine_code.other_cases import shortest_way

# Two conditions, one after the other. Each has a short way and one with three more instructions,
# the second at its end.
LISTING = """
	.section	.text.quantize,"ax",@progbits
        /*0000*/                   LDG.E R0, desc[UR18][R2.64] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   FMNMX R0, R0, R1, !PT ;
        /*0030*/                   FMNMX R0, R0, R2, PT ;
        /*0040*/                   FADD R0, R0, R3 ;
.L_x_1:
        /*0050*/                   FADD R0, R0, R4 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   STG.E desc[UR18][R4.64], R0 ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   FMNMX R0, R0, R1, !PT ;
        /*00a0*/                   FMNMX R0, R0, R2, PT ;
        /*00b0*/                   STG.E desc[UR18][R4.64], R0 ;
        /*00c0*/                   EXIT ;

	.section	.text.endless,"ax",@progbits
.L_x_3:
        /*0000*/                   BRA `(.L_x_3);
"""
FUNCTIONS = sass.functions(LISTING)


def test_each_condition_is_passed_by_its_shorter_side():
    assert [16 * index for index in shortest_way(FUNCTIONS["quantize"])] == [
        0x00,
        0x10,
        0x50,
        0x60,
        0x70,
        0x80,
    ]


def test_where_the_short_side_is_gone_the_long_one_counts():
    only = LISTING.replace("@!P0 BRA `(.L_x_1)", "NOP")
    assert only != LISTING
    assert len(shortest_way(sass.functions(only)["quantize"])) == 9


def test_a_kernel_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="endless has no end"):
        shortest_way(FUNCTIONS["endless"])
