"""A decode step's time has its share of quantizing a block, and alternatives take turns."""

from __future__ import annotations

import itertools
import pathlib

import pytest

from benchmarks.cpu import attention, decode_step, page
from benchmarks.cpu.timing import DECODE_STEP, CpuReport, Row, Shape
from benchmarks.turns import Cycle, check_rounds, cycle, in_turns

SMALL = ["--layers", "1", "--head-dim", "32", "--tokens", "160", "--batch", "1"]


def test_alternatives_take_turns_after_a_call_that_does_not_count():
    calls, clock = [], itertools.count().__next__
    works = [lambda: calls.append("a"), lambda: calls.append("b")]
    (times,) = in_turns(works, 3, [lambda: float(clock())])
    assert "".join(calls) == "ab" + 3 * "ab"
    assert times.tolist() == [[1e3] * 3] * 2


def test_every_clock_times_the_same_calls():
    wall, cpu = (iter(range(0, 100, step)).__next__ for step in (1, 5))
    times = in_turns([lambda: None] * 2, 4, [lambda: wall(), lambda: cpu()])
    assert times.shape == (2, 2, 4)
    assert (times[0] == 1e3).all()
    assert (times[1] == 5e3).all()


def test_a_step_has_its_share_of_the_one_that_quantizes():
    samples = [10.0] * 29 + [42.0] + [10.0] * 2
    assert Cycle(32, (29,)).step(samples) == pytest.approx(10 + 32 / 32)
    assert Cycle(32, (29,)).ratio(samples, [20.0] * 32) == pytest.approx(0.5 + 0.05)
    interrupted = [900.0, *samples[1:]]
    assert Cycle(32, (29,)).step(interrupted) == pytest.approx(11)
    assert Cycle().step(interrupted) == 10


def test_ratios_are_of_the_same_round():
    base = [10.0, 20.0] * 16  # the machine is half as fast in every other round
    samples = [2 * ms for ms in base]
    samples[29] = 10 * base[29]
    assert Cycle(32, (29,)).ratio(samples, base) == pytest.approx((31 * 2 + 10) / 32)


@pytest.mark.parametrize("spec", ["kivi:bits=4", "innerq:bits=2", "polarquant", "kvquant:bits=3"])
def test_whole_blocks_of_steps_quantize_one_block_each(spec: str):
    for length in (130, 256, 4099):
        one = cycle(spec, length, 128)
        assert len(one.ageing) * one.block == 128
    assert cycle("dense", 130, 128) == Cycle()


def test_a_run_that_leaves_out_the_step_that_quantizes_is_refused(capsys):
    with pytest.raises(ValueError, match="multiple of 32"):
        check_rounds(["dense", "kivi:bits=4"], [4096], 9)
    with pytest.raises(ValueError, match="multiple of 128"):
        check_rounds(["kivi:bits=4", "polarquant"], [4096], 32)
    with pytest.raises(ValueError, match="innerq does not quantize after 64 tokens"):
        check_rounds(["kivi:bits=4,recent=0", "innerq"], [64], 32)
    check_rounds(["dense", "kivi:bits=4", "polarquant"], [256, 1024], 128)
    with pytest.raises(SystemExit):
        decode_step.main([*SMALL, "--cache", "kivi:bits=4", "--rounds", "9"])
    assert "--rounds 9 must be a multiple of 32" in capsys.readouterr().err


def test_attention_alone_is_not_timed_at_a_length_at_which_each_call_quantizes(capsys):
    with pytest.raises(SystemExit):
        attention.main(["--cache", "kvquant:bits=3", "--tokens", "1024"])
    said = "--tokens 1024: each call would quantize a block of kvquant:bits=3; give 1025"
    assert said in capsys.readouterr().err
    assert not cycle("kvquant:bits=3", 1025, 1).ageing


def test_a_decode_step_is_timed_over_a_whole_block(tmp_path: pathlib.Path):
    file = tmp_path / "decode_step.json"
    decode_step.main([*SMALL, "--cache", "kivi:bits=4", "--rounds", "32", "--json", str(file)])
    report = CpuReport.read(file)
    for row, block in zip(report.rows, (1, 32), strict=True):
        one = report.cycle(row)
        assert (one.block, len(one.ageing)) == (block, block // 32)
        assert row.ratio == pytest.approx(report.ratio(row), abs=1e-4)
    assert "No timed step" not in page.page(report, file)


@pytest.mark.parametrize(("rounds", "ages"), [(25, False), (30, True)])
def test_an_older_page_says_if_no_step_of_its_run_quantized_a_block(
    tmp_path: pathlib.Path, rounds: int, ages: bool
):
    def row(name: str, *last: float) -> Row:
        samples = (2.0,) * (rounds - len(last)) + last
        return Row(name, Shape(1, 4096, 64, 1, 1), "float32", samples, 1.0, 0.0, 1, 1, 1)

    file = tmp_path / "old.json"
    rows = row("dense"), row("kivi:bits=4", 34.0)
    CpuReport(
        command=f"python -m {DECODE_STEP}",
        date="",
        jax_version="",
        baseline="dense",
        cpu="c",
        cores=1,
        load=(0.1,),
        rows=rows,
    ).write(file)
    text = page.page(CpuReport.read(file), file)
    assert ("No timed step of `kivi:bits=4` quantizes a block" in text) != ages
    assert ("| 4096 | kivi:bits=4 | 3.00 | 2.00 | 1.50 |" in text) == ages
    assert ("| 4096 | kivi:bits=4 | 2.00 | 2.00 | 1.00 |" in text) != ages
