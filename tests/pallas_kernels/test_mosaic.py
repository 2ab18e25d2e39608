"""Attention on Mosaic GPU against its reference, in an interpreter that looks for races, and the
choice of its route."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.schedule import Schedule
from pallas_kernels.decode_attention.tuning import Tuning, shared_bytes_of
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from pallas_kernels.mosaic.walk import Walk
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.dense import DenseReader
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.polar import PolarReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.tiles.layout import SPAN, plane_layout
from tests.exhaustive import some
from tests.float64 import rotated, row_errors, softmax
from tests.pallas_kernels.codebook_sides import codebook_side
from tests.pallas_kernels.grouped_sides import format_of, reader_of
from tests.pallas_kernels.harness import (
    KernelCase,
    Lengths,
    attend,
    check_attention,
    check_unused_capacity,
    lowered_attention,
    output,
)
from tests.pallas_kernels.kernel_cases import (
    CASES,
    EIGEN,
    POLAR,
    RUNS,
    codebook,
    innerq,
    kivi,
    looked_up,
    polar,
    rows,
    turned,
)
from tests.pallas_kernels.lowering import needs_mosaic

INTERPRETED = Launch(interpret=True, route="mosaic")
# The capacity is not a multiple of the tile, so the last tile moves back, and some of its warps
# have no live token.
LENGTHS = Lengths(160, (0, 31, 160))
WIDE = {"kivi2_h64_g4_size64": Lengths(192, (0, 95, 192))}  # whole groups of tokens
WIDE |= {f"kivi4_h64_g4_size128{turned}": Lengths(256, (0, 95, 250)) for turned in ("", "_turned")}
WIDE |= {"m4n4_size128_h64_g4": Lengths(256, (0, 95, 250))}
WIDE |= dict.fromkeys(("m4n4_size64_h256_g1", "m4n2_size64_h64_g9"), Lengths(192, (0, 95, 192)))
WIDE |= {"rows_h64_g4": Lengths(137, (0, 63, 137))}  # rows need no whole spans
WIDE |= {case.id: case.short for case in (*RUNS, *EIGEN)}  # tiles of 256 tokens
# Whole groups and stripes of all formats. The default tuning gives each row several splits.
ON_A_GPU = Lengths(1280, (0, 1, 127, 128, 257, 1001, 1280))
TUNING = Tuning(128, stages=2, cores=5, resident=1)  # fewer programs than rows and heads


def in_polar_form(*format: Any) -> KernelCase:
    """Return polar keys with the error that their polynomials in fp16 may have."""
    return dataclasses.replace(polar(*format), tolerance=5e-3, margin=6)


SCHEMES = ("sym", "hybrid", "asym")
GRID = (
    *(
        innerq(bits, scheme, head_dim, group)
        for bits, scheme, head_dim, group in itertools.product(
            (1, 2, 3, 4, 7), SCHEMES, (64, 128, 256), (1, 4, 8)
        )
        if bits + (scheme != "asym") in (2, 3, 4, 5, 8)
    ),
    *(
        kivi(bits, head_dim, group)
        for bits, head_dim, group in itertools.product((2, 3, 4, 8), (64, 128, 256), (1, 4, 8))
    ),
    innerq(8, "asym", 128, 16),
    kivi(4, 128, 16),
    kivi(2, 64, 9),
    *(kivi(bits, 64, 4, size) for bits, size in ((2, 64), (4, 128))),
    *(
        looked_up(bits, scales, head_dim, group)
        for bits, scales, head_dim, group in itertools.product(
            (2, 3, 4), ("token", 32), (64, 128, 256), (1, 4, 8)
        )
    ),
    looked_up(4, "token", 64, 9),
    *(rows(head_dim, group) for head_dim, group in ((64, 4), (128, 16), (256, 1), (256, 8))),
    CASES["k_dense_v2"],
    *(
        turned(kivi(bits, head_dim, group))
        for bits, head_dim, group in itertools.product((2, 3, 4, 8), (64, 128, 256), (1, 4, 8))
    ),
    *(turned(innerq(2, scheme, 64)) for scheme in SCHEMES),
    *(turned(looked_up(bits, "token", head_dim)) for bits, head_dim in ((2, 64), (3, 128))),
    *(
        codebook(f"table{bits}_of_channels_h{head_dim}", *sides, head_dim, group)
        for bits, head_dim, group in ((4, 64, 8), (3, 128, 4), (2, 256, 1))
        for sides in [(codebook_side(bits, "channels", pre_rope=True), codebook_side(bits, 32))]
    ),
    turned(kivi(4, 64, 9)),
    turned(kivi(4, 64, 4, 128)),
    *(
        in_polar_form(4, radius, size, head_dim, group, values)
        for radius, size, head_dim, group, values in (
            (4, 128, 64, 4, None),
            (4, 32, 128, 8, format_of(4, "asym", "channels", 128)),
            (4, 64, 256, 1, format_of(2, "asym", "tokens", 256)),
            (2, 64, 64, 9, None),
            (2, 32, 128, 1, None),
        )
    ),
    in_polar_form(6, 2, 32, 64, 2, None),
    in_polar_form(5, 1, 32, 128, 4, None),
    *RUNS,
    *EIGEN,
)
# Words that one, two and four tokens share, in one and two plane sets; 8 and 16 query columns.
USUAL = ("innerq2_hybrid_h64_g4", "kivi2_h64_g9_size32", "table4_token_h64_g9", "rows_h64_g4")
USUAL += ("kivi4_h64_g9_size32_turned", "m4n2_size64_h64_g9", RUNS[2].id, EIGEN[0].id)


def usual_of(cases: tuple[KernelCase, ...]) -> list[KernelCase]:
    return [case for case in cases if case.id in USUAL]


def tuning_of(case: KernelCase) -> Tuning:
    return dataclasses.replace(TUNING, tile=256) if case in (*RUNS, *EIGEN) else TUNING


def each(cases: tuple[KernelCase, ...]) -> pytest.MarkDecorator:
    lengths = [WIDE.get(case.id, LENGTHS) for case in cases]
    cases = tuple(
        dataclasses.replace(case, short=of_case, long=of_case, tuning=tuning_of(case))
        for case, of_case in zip(cases, lengths, strict=True)
    )
    return pytest.mark.parametrize("case", some(cases, usual_of(cases)), ids=lambda case: case.id)


@needs_mosaic
@each(GRID)
def test_attention_equals_its_reference_without_a_race(case: KernelCase):
    check_attention(case, case.short, case.tuning, INTERPRETED)


@needs_mosaic
@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", GRID, ids=lambda case: case.id)
def test_attention_on_a_gpu_equals_its_reference(case: KernelCase):
    if case.tolerance < 1e-2:  # of polar keys; interpreted, up to 6.5e-3 at these lengths
        case = dataclasses.replace(case, tolerance=8e-3, margin=3)
    check_attention(case, ON_A_GPU, None, Launch(route="mosaic"))


@needs_mosaic
@pytest.mark.exhaustive
@each(
    (
        *(innerq(2, "sym", 64), innerq(2, "asym", 64), kivi(2, 64), looked_up(3, 32, 64)),
        *(rows(64, 4), turned(kivi(2, 64)), in_polar_form(4, 4, 32, 64, 4, None), RUNS[1]),
    )
)
def test_what_lies_behind_a_limit_changes_nothing(case: KernelCase):
    check_unused_capacity(case, case.short, case.tuning, INTERPRETED)


@needs_mosaic
def test_a_planted_race_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Copies overwrite what warps may still read, if nothing makes them wait for the warps."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # JAX does not export its reset

    from pallas_kernels.mosaic import block

    monkeypatch.setattr(block.Block, "release", lambda self: None)
    case = dataclasses.replace(kivi(2, 64, 2), short=LENGTHS)
    jax.clear_caches()
    try:
        with pytest.raises(Exception, match="RACE DETECTED"):
            check_attention(case, case.short, TUNING, INTERPRETED)
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        jax.clear_caches()


@needs_mosaic
@pytest.mark.parametrize("block", some((32, 96), [96]))
def test_keys_of_a_shard_are_rotated_to_the_positions_of_its_blocks(block: int):
    case, (shard, shards), limits = kivi(4, 64, 2), (1, 3), (160, 192)
    k, v = case.sides(Lengths(192, limits))
    reader = RotatedReader(k.reader, sink=7, block=block, shards=shards)
    frequencies = (100.0 ** (-np.arange(32) / 32)).astype(np.float32)
    q, rope = case.queries(len(limits)), [frequencies, np.float32(1.25), np.int32(shard)]
    args = [*k.arrays, *rope], v.arrays, jnp.asarray(limits), 192, TUNING, INTERPRETED
    actual = output(attend((reader, v.reader), q, *args))
    stored = np.arange(192)
    tokens = (stored // block * shards + shard) * block + stored % block

    def error(positions: np.ndarray) -> float:
        rows = rotated(k.rows, positions[:, None] * frequencies.astype(np.float64), 1.25)
        scores = np.asarray(q, np.float64) @ np.swapaxes(rows, 2, 3) / 8
        live = stored < np.asarray(limits)[:, None, None, None]
        expected = softmax(np.where(live, scores, -np.inf)) @ v.rows
        return row_errors(actual, expected).max()

    assert error(7 + tokens) < case.tolerance
    assert error(7 + tokens + block) > 3 * case.tolerance, "another shard's blocks would pass"
    assert error(7 + stored + block) > 3 * case.tolerance, "neighbouring blocks would pass"


@needs_mosaic
@pytest.mark.parametrize(
    "case",
    [
        *(innerq(3, "sym", 128), looked_up(3, 32, 128), rows(256, 4), turned(kivi(2, 128))),
        *(POLAR[0], RUNS[4]),
    ],
    ids=lambda case: case.id,
)
def test_a_kernel_lowers_for_cuda_without_triton(case: KernelCase):
    text = lowered_attention(case, Launch(route="mosaic"))
    assert "mosaic_gpu" in text
    assert "mosaic_gpu" not in lowered_attention(case, Launch()), "both routes would pass"


@pytest.mark.parametrize("lower", [(), (0, 0, 127, 128, 600, 0)], ids=["", "lower"])
@pytest.mark.parametrize("programs", [5, 64])
def test_programs_walk_the_runs_of_the_schedule(programs: int, lower: tuple[int, ...]):
    limits = [0, 1, 128, 129, 2000, 0]
    schedule = Schedule(programs, 128, len(limits), 3, lower=bool(lower))
    places = jnp.asarray([*limits, *lower], jnp.int32)
    walk, tiles = Walk(schedule, places), 3 * (1 + 1 + (1 if lower else 2) + (12 if lower else 16))

    @jax.jit
    def of_both(program: jax.Array, at: jax.Array) -> tuple[Any, Any]:
        begin, end = schedule.share(places, program)
        shares = (begin, end), walk.share(program)
        inside = (begin <= at) & (at < end)
        runs = schedule.run(places, at, end), walk.run(at, end)
        return tuple(zip(shares, runs, strict=True)), inside

    numbers = jnp.arange(programs), jnp.arange(tiles)
    (wanted, walked), inside = jax.vmap(jax.vmap(of_both, (None, 0)), (0, None))(*numbers)
    assert (np.sum(inside, axis=0) == 1).all(), "every tile has one program"
    for name, want, have in zip(("share", "run"), wanted, walked, strict=True):
        for one, other in zip(*map(jax.tree.leaves, (want, have)), strict=True):
            np.testing.assert_array_equal(one[inside], other[inside], err_msg=name)
    first, row = (np.asarray(numbers)[inside] for numbers in (wanted[1].first, wanted[1].row))
    assert len(set(row.tolist())) == 4, "all live rows have runs"
    assert first[row == 4].min() == (600 // 128 if lower else 0), "dead tiles are skipped"


def readers_of(bits: int, head_dim: int) -> list[GroupedReader]:
    formats = (format_of(bits, "asym", axis, head_dim) for axis in ("tokens", "channels"))
    readers = [reader_of(format, head_dim) for format in formats]
    return [reader for reader in readers if isinstance(reader, GroupedReader)]


def test_bodies_that_mosaic_does_not_read_are_named():
    k, v = readers_of(4, 64)
    for shared in (1, 2, 4):  # spans share scales
        wide = dataclasses.replace(k, group=shared * SPAN)
        assert route.unsupported(wide, v, 16, 128) is None
    coded, bits = PolarReader(plane_layout(8, 32, SPAN), 4, 128), plane_layout(4, 32, SPAN)
    assert route.unsupported(coded, v, 4, 128) is None
    refused = {
        "groups of 256 tokens": (dataclasses.replace(k, group=8 * SPAN), v, 4, 128),
        "float16": (k, dataclasses.replace(v, scale_dtype="bfloat16"), 4, 128),
        "17 query heads": (k, v, 17, 128),
        "fewer than one tile": (k, v, 4, 96),
        "outliers of 64 tokens": (k, CodebookReader(v.layout, "tokens", 64, pool=64), 4, 128),
        "scales of channels": (CodebookReader(k.layout, "channels", 64), v, 4, 128),
        "blocks of 48 tokens before RoPE": (RotatedReader(k, block=48, shards=2), v, 4, 128),
        "k: scales in bfloat16": (
            RotatedReader(dataclasses.replace(k, scale_dtype="bfloat16")),
            *(v, 4, 128),
        ),
        "angles of 2 bits": (PolarReader(bits, 2, 128), v, 4, 128),
        "steps in bfloat16": (dataclasses.replace(coded, scale_dtype="bfloat16"), v, 4, 128),
    }
    assert route.unsupported(RotatedReader(k), v, 4, 128) is None
    for reason, (keys, values, group, capacity) in refused.items():
        assert reason in str(route.unsupported(keys, values, group, capacity))


def test_gpus_without_a_copy_engine_need_as_many_scales_as_threads_copy():
    """Asynchronous copies move four bytes or more, so two scales, for each of 128 threads."""
    k, v = readers_of(4, 64)
    tables = CodebookReader(v.layout, "tokens", 64)  # one scale for a token
    rows = DenseReader(64, "bfloat16")
    for bulk, capability in itertools.product((True, False), ("8.0", "8.9", "9.0", "10.0")):
        if bulk != (float(capability) >= route.BULK):
            continue
        for keys, values in itertools.product((k, v, tables, rows), repeat=2):
            tile = route.tuning_for(keys, values, 8, 4096, capability).tile
            assert tile >= route.min_tile(keys, values, capability)
            if not bulk and tables in (keys, values):
                assert tile == 256
        assert (route.unsupported(tables, v, 4, 128, capability) is None) == bulk
    sparse = dataclasses.replace(k, group=128)  # 64 scales for 128 tokens
    assert "tiles of 512 tokens" in str(route.unsupported(sparse, v, 4, 4096, "8.9"))
    assert route.unsupported(sparse, v, 4, 4096) is None


def test_a_route_that_this_jax_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(route, "missing", lambda: "no Mosaic GPU")
    case = dataclasses.replace(kivi(4, 64), short=LENGTHS)
    with pytest.raises(ValueError, match="route='mosaic' cannot run: no Mosaic GPU"):
        check_attention(case, case.short, TUNING, INTERPRETED)


def test_tiles_fit_the_shared_memory_of_the_gpu():
    for bits, capability in itertools.product((2, 4, 8), ("8.0", "8.9", "9.0", "10.0")):
        narrow, v = readers_of(bits, 128)
        for k in (narrow, dataclasses.replace(narrow, group=4 * SPAN)):
            tuning = route.tuning_for(k, v, 8, 4096, capability)
            of_tiles = tuning.stages * tuning.tile * (k.row_bytes + v.row_bytes)
            reductions, system = 4096, 2048  # as compiled for an H200
            bytes_of_block = of_tiles + reductions + system
            assert tuning.resident * bytes_of_block <= shared_bytes_of(capability)
            assert np.log2(tuning.tile / route.STRIPE) in (0, 1)
