"""Comparisons of our own: SQuat and PolarQuant beside methods of the same bits, and the queries that span SQuat's subspace."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.quality.comparison import Suite, listed


def squat_polarquant() -> Suite:
    """SQuat and PolarQuant beside methods of the same bits. Windows are those of each method unless the table says otherwise."""
    window, same = "sink=0,recent=96,block=32", "cache:sink=0,recent=0,block=128"
    low = (
        ("exact", "dense"),
        ("squat", "squat"),
        ("squat_pre", "squat_pre"),
        ("kivi", "kivi"),
        ("kivi, keys before RoPE", "kivi:pre_rope=true"),
        ("innerq, windows as kivi", f"innerq:{window}"),
        ("innerq, 2 bits with the sign", f"innerq:total_bits=2,{window}"),
        ("int2, windows as kivi", f"int2:group_size=32,{window}"),
    )
    keys = (
        ("exact", "dense"),
        ("polarquant 4 + 4", "polarquant"),
        ("polarquant 4 + 4, fixed cut", "polarquant:cut=fixed"),
        ("polarquant 4 + 4, global grid", "polarquant:grid=global"),
        ("kivi 4, groups of 128", "kivi:bits=4,group_size=128"),
        ("kivi 4, groups of 32", "kivi:bits=4,group_size=32"),
        ("int4", "int4"),
        ("polarquant 4 + 2", "polarquant:radius_bits=2,group_size=64"),
        ("polarquant 4 + 2, fixed cut", "polarquant:radius_bits=2,group_size=64,cut=fixed"),
        ("polarquant 3 + 3", "polarquant:angle_bits=3,radius_bits=3,group_size=64"),
        ("kivi 3, groups of 64", "kivi:bits=3,group_size=64"),
        ("int3", "int3"),
        ("polarquant 3 + 2", "polarquant:angle_bits=3,radius_bits=2,group_size=64"),
        ("polarquant 2 + 2", "polarquant:angle_bits=2,radius_bits=2,group_size=64"),
        ("kivi 2, groups of 64", "kivi:bits=2,group_size=64"),
    )
    return Suite(
        "Quality of SQuat and PolarQuant",
        (
            listed("2 bits, keys and values", low),
            listed("SQuat by rank and lambda", _squat_grid()),
            listed("Keys alone, the same windows (block 128, no recent)", ((name, f"k={cache}+v=dense+{same}") for name, cache in keys)),
        ),
    )


def _squat_grid() -> Iterator[tuple[str, str]]:
    for rank in (1, 5, 20, 64):
        for lam in ("1e-06", "1e-05", "0.0001", "0.001"):
            yield f"rank {rank}, lambda {lam}", f"squat:rank={rank},lam={lam}"


def squat_queries() -> Suite:
    """Compare the queries that span SQuat's subspace: the prompt's where they are, or turned to the positions that follow it."""
    return Suite(
        "Quality of SQuat by the queries that span its subspace",
        tuple(listed(f"Queries that span the subspace, {bits} bits", _squat_queries(bits)) for bits in (2, 3)),
    )


def _squat_queries(bits: int) -> Iterator[tuple[str, str]]:
    given = f"bits={bits},rank=64,block_channels=8"
    yield "exact", "dense"
    yield "kivi", f"kivi:bits={bits}"
    yield "squat, as the paper has it", f"squat:bits={bits}"
    yield "squat, all directions", f"squat:{given}"
    for ahead in (64, 256, 512):
        yield f"squat, turned to the next {ahead} positions", f"squat:{given},ahead={ahead}"
    yield "kivi, keys before RoPE", f"kivi:bits={bits},pre_rope=true"
    yield "squat_pre, as the paper has it", f"squat_pre:bits={bits}"
    yield "squat_pre, all directions", f"squat_pre:{given}"
