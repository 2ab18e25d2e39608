"""Machine code is read correctly: loops, classes of instructions, waiting loads, spills, and the
shortest way through a kernel without a loop. Needs only listings."""

import dataclasses

import pytest

from benchmarks.machine_code import sass, tools
from benchmarks.machine_code.__main__ import WATCHED
from benchmarks.machine_code.other_cases import shortest_way
from benchmarks.machine_code.report import HEADER, Instructions, KernelReport
from benchmarks.machine_code.target import A100, H200, ISSUED, TARGETS
from benchmarks.results_page import RESULTS

# A shortened output of `nvdisasm -c`: an outer loop over splits (1) with a main loop (2) and its
# masked copy (3), then a loop without matrix instructions (5) and the endless loop after the end
# (6). The main loop skips an instruction (4) and has an exit for diverged warps that lies after the
# end and comes back (7, 8).
LISTING = """
	.target	sm_90a
	.section	.nv.info.attend,"",@"SHT_CUDA_INFO"
        /*0000*/                   NOT CODE ;
	.section	.text.attend,"ax",@progbits
        .type           attend,@function
attend:
.text.attend:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E R0, desc[UR18][R2.64] ;
        /*0020*/                   STL.64 [R1], R18                        (*"SpillRefill"*);
.L_x_1:
        /*0030*/                   IADD3 R9, R9, 0x1, RZ ;
.L_x_2:
        /*0040*/                   UIADD3 UR14, UR14, 0x1, URZ ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R37], desc[UR18][R16.64], !P2 ;
        /*0060*/              @!P3 LDG.E.U16 R4, desc[UR18][R2.64+0x40] ;
        /*0070*/                   BRA.DIV UR4, `(.L_x_7) ;
        /*0080*/                   SHFL.IDX PT, R11, R225, R3, 0x1f ;
.L_x_8:
        /*0090*/              @!P1 BRA `(.L_x_4) ;
        /*00a0*/                   LDL.LU R36, [R1]                        (*"SpillRefill"*);
.L_x_4:
        /*00b0*/                   LOP3.LUT R5, R26.reuse, 0x3, RZ, 0xc0, !PT ;
        /*00c0*/                   IMAD.MOV.U32 R16, RZ, RZ, R48.reuse ;
        /*00d0*/                   I2FP.F32.S32 R8, R7 ;
        /*00e0*/                   HMMA.16816.F32 R16, R8, R4, R16 ;
        /*00f0*/                   HMMA.1688.F32 R16, R8, R4, R16 ;
        /*0100*/                   BRA.U !UP0, `(.L_x_2) ;
.L_x_3:
        /*0110*/                   ISETP.GE.AND P0, PT, R0, R9, PT ;
        /*0120*/                   FSEL R3, R3, -1e+30, P0 ;
        /*0130*/                   LDSM.16.M88.4 R4, [R242] ;
        /*0140*/                   MUFU.EX2 R3, R3 ;
        /*0150*/                   HADD2 R4, R4, R5 ;
        /*0160*/                   LDGDEPBAR ;
        /*0170*/                   FNEW R4, R4 ;
        /*0180*/                   FFMA R3, R3, R3, R3 ;
        /*0190*/                   FADD R3, R3, R3 ;
        /*01a0*/                   STS [R3], R3 ;
        /*01b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*01c0*/                   HMMA.16816.F32 R16, R8, R4, R16 ;
        /*01d0*/                   HMMA.1688.F32 R16, R8, R4, R16 ;
        /*01e0*/               @P1 BRA `(.L_x_3) ;
        /*01f0*/               @P2 BRA `(.L_x_1) ;
.L_x_5:
        /*0200*/                   STG.E desc[UR18][R4.64], R39 ;
        /*0210*/               @P3 BRA P4, `(.L_x_5) ;
        /*0220*/                   EXIT ;
.L_x_6:
        /*0230*/                   BRA `(.L_x_6);
.L_x_7:
        /*0240*/                   WARPSYNC.COLLECTIVE R4, `(.L_x_8) ;
        /*0250*/                   BRA `(.L_x_8) ;
        /*0260*/                   NOP;
.L_x_9:

	.section	.text.copy,"ax",@progbits
copy:
.text.copy:
.L_x_10:
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/                   STG.E.128 [R2.64], R4 ;
        /*0020*/              @!P0 BRA `(.L_x_10) ;
        /*0030*/                   EXIT ;

	.section	.text.straight,"ax",@progbits
        /*0000*/                   EXIT ;
"""
FUNCTIONS = sass.functions(LISTING)
REPORT = KernelReport(
    name="attention, 2 bits",
    kernel="attend",
    target="h200",
    registers=255,
    spill_bytes=32,
    shared_bytes=20480,
    threads=32,
    warps_per_sm=8,
    loop={"int": 768, "cvt": 16, "f16": 1086, "mma": 128},
    loop_spills=0,
    plain_loads=0,
    loop_multiply_adds=262144,
    elements_per_iteration=128 * 256,
    stored_bits=2.53,
)


def addresses(loop: sass.Loop) -> list[int]:
    return [16 * index for index in loop.indices]


def test_loops_are_those_that_control_flow_makes():
    loops = {addresses(loop)[0]: addresses(loop) for loop in sass.loops(FUNCTIONS["attend"])}
    assert {start: (len(body), body[-1]) for start, body in loops.items()} == {
        0x30: (29, 0x1F0),
        0x40: (13, 0x100),
        0x110: (14, 0x1E0),
        0x200: (2, 0x210),
    }, "an endless loop after the end and a way back from a diverged warp's code are not loops"


def test_the_main_loop_is_an_innermost_one_and_not_its_masked_copy():
    assert addresses(sass.main_loop(FUNCTIONS["attend"]))[0] == 0x40
    more = LISTING.replace(
        "HMMA.1688.F32 R16, R8, R4, R16 ;\n        /*01e0",
        "HMMA.16816.F32 R16, R8, R4, R16 ;\n        /*01e0",
    )
    assert more != LISTING
    assert addresses(sass.main_loop(sass.functions(more)["attend"]))[0] == 0x110, (
        "what computes more counts, not what is shorter"
    )


def test_a_kernel_without_a_loop_is_refused():
    with pytest.raises(ValueError, match="straight has no loop"):
        sass.main_loop(FUNCTIONS["straight"])


def test_the_instructions_of_a_loop_are_classified():
    main, masked = (
        next(loop for loop in sass.loops(FUNCTIONS["attend"]) if addresses(loop)[0] == start)
        for start in (0x40, 0x110)
    )
    assert main.counts() == {
        "int": 2,
        "cvt": 1,
        "mma": 2,
        "ldg": 2,
        "shfl": 1,
        "mov": 1,
        "bra": 3,
        "spill": 1,
    }
    assert masked.counts() == {
        "int": 1,
        "f32": 4,
        "f16": 1,
        "mma": 2,
        "lds": 2,
        "bar": 2,
        "bra": 1,
        "other": 1,
    }
    assert main.plain_loads == 1, "LDGSTS does not wait"
    assert masked.plain_loads == 0


def test_a_report_computes_per_element_and_against_the_memory_limit():
    assert REPORT.loop_instructions == 1998
    assert REPORT.instructions_per_element == pytest.approx(1.951, abs=1e-3)
    assert REPORT.alu_per_element == pytest.approx(784 / 1024)
    assert REPORT.per_element("mma") == 0.125
    assert REPORT.mma_columns == 8
    assert REPORT.budget == pytest.approx(2.18, abs=5e-3)
    assert REPORT.bound == pytest.approx(2.18 / 1.951, abs=5e-3)
    assert REPORT.share == pytest.approx(ISSUED * REPORT.bound)
    assert REPORT.share < 1
    assert dataclasses.replace(REPORT, stored_bits=5).share == 1
    busy = dataclasses.replace(REPORT, loop={"int": 2000, "f16": 500})
    assert busy.bound == pytest.approx(REPORT.budget / (2 * 2000 / 1024)), (
        "integer operations issue at half the rate"
    )
    assert len(REPORT.line()) == len(HEADER)


def test_budgets_and_occupancy_of_the_targets():
    assert H200.budget(4.5) == pytest.approx(2 * H200.budget(2.25))
    assert A100.budget(2.53) > H200.budget(2.53)
    assert H200.warps_per_sm(255, 32, 20480) == 8, "registers"
    assert H200.warps_per_sm(32, 32, 20480) == 10, "shared memory"
    assert A100.warps_per_sm(32, 32, 20480) == 7, "shared memory"
    assert H200.warps_per_sm(32, 32, 0) == 32, "blocks"
    assert H200.warps_per_sm(32, 256, 0) == 64, "warps"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tools, "_spec", lambda module: None)
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"ptxas is missing.*extra `aot`"):
        tools.find_tool("ptxas")
    with pytest.raises(RuntimeError, match=r"CUDA plugin is missing.*extra `aot`"):
        tools.cuda_plugin()
    assert "CUDA plugin is missing" in tools.missing()


def test_the_committed_counts_are_of_the_cases_and_within_their_limits():
    """Check both targets and every case, which tests that compile can afford only for some."""
    rows = {
        (row.name, row.target): row for row in Instructions.read(RESULTS / "instructions.json").rows
    }
    assert set(rows) == {(case.name, target) for case in WATCHED for target in TARGETS}
    failures = [
        line
        for case in WATCHED
        for target in TARGETS
        for line in case.failures(rows[case.name, target])
    ]
    assert not failures, "\n".join(failures)


def test_what_an_a100_may_spill_an_h200_may_not():
    case = next(case for case in WATCHED if case.name == "kivi, 2-bit, H 128, asm")
    row = next(
        row
        for row in Instructions.read(RESULTS / "instructions.json").rows
        if (row.name, row.target) == (case.name, "a100")
    )
    assert row.loop_spills
    assert not case.failures(row)
    assert "spills in the loop" in "\n".join(case.failures(dataclasses.replace(row, target="h200")))


# Two conditions, one after the other. Each has a short way and one with three more instructions,
# the second at its end.
BRANCHES = """
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
BRANCHING = sass.functions(BRANCHES)


def test_each_condition_is_passed_by_its_shorter_side():
    assert [16 * index for index in shortest_way(BRANCHING["quantize"])] == [
        0x00,
        0x10,
        0x50,
        0x60,
        0x70,
        0x80,
    ]


def test_where_the_short_side_is_gone_the_long_one_counts():
    only = BRANCHES.replace("@!P0 BRA `(.L_x_1)", "NOP")
    assert only != BRANCHES
    assert len(shortest_way(sass.functions(only)["quantize"])) == 9


def test_a_kernel_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="endless has no end"):
        shortest_way(BRANCHING["endless"])
