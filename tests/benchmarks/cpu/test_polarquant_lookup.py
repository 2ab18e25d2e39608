"""The benchmark of PolarQuant's look-ups in XLA, and what it found: where a compiler makes the
cosines."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cpu import polarquant_lookup
from benchmarks.cpu.timing import CpuReport
from kvq_jax.arrays import polar_array
from kvq_jax.arrays.polar_array import PolarFormat


def test_every_way_has_a_row_and_the_same_scores(tmp_path: pathlib.Path):
    file = tmp_path / "polarquant_lookup_cpu.json"
    small = [
        "--quick",
        "--head-dim",
        "32",
        "--kv-heads",
        "2",
        "--group",
        "1",
        "3",
        "--cache",
        "polarquant",
        "polarquant:grid=global",
    ]
    polarquant_lookup.main([*small, "--json", str(file)])
    report = CpuReport.read(file)
    assert [row.implementation for row in report.rows[:4]] == [
        f"polarquant, {way}" for way in polarquant_lookup.WAYS
    ]
    assert len(report.rows) == 2 * 2 * len(polarquant_lookup.WAYS)
    assert all(row.error < 1e-5 for row in report.rows), [
        (row.implementation, row.error) for row in report.rows
    ]


def test_tokens_must_be_whole_blocks(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        polarquant_lookup.main(["--tokens", "100", "--cache", "polarquant"])
    assert stop.value.code == 2
    assert "--tokens 100 must be a multiple of 128" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_cosines_are_made_for_groups_and_not_for_tokens(bits: int):
    """The largest array in a computation that makes a cosine: XLA on CPUs likes to make each one
    where it is used. Written plainly, with 3 bits, it does (20 times slower)."""
    rng = np.random.default_rng(0)
    tokens, half = 512, 32
    body = polar_array.quantize(
        jnp.asarray(rng.normal(size=(1, 2, tokens, 2 * half)), jnp.float32),
        PolarFormat(bits, 2, 2 * half, 128, 128),
    )
    q = jnp.asarray(rng.normal(size=(1, 2, 1, 2 * half)), jnp.float32)

    def largest(way: polarquant_lookup.Scores) -> int:
        text = jax.jit(lambda q, body: way(q, body, None)).lower(q, body).compile().as_text()
        made = [part for part in text.split("\n\n") if re.search(r" (co)?sine\(", part)]
        assert made, "no cosine at all: the comparison says nothing"
        shapes = [found for part in made for found in re.findall(r"f32\[([\d,]+)\]", part)]
        return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)

    for way in (polarquant_lookup.keys, polarquant_lookup.products):
        assert largest(way) < 2 * tokens * half, f"{way.__name__} makes a cosine for each token"
    if bits == 3 and jax.default_backend() == "cpu":
        assert largest(polarquant_lookup.plain_tables) >= 2 * tokens * half, (
            "plain tables are no worse: the loop may have become needless"
        )
