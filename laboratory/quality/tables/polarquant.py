"""PolarQuant: Wu et al. (2025)."""

from __future__ import annotations

from collections.abc import Iterator

from laboratory.quality.comparison import Suite, listed

SAME = "cache:sink=0,recent=0,block=128"


def polarquant() -> Suite:
    """Return Table 5, keys alone and values in full precision, as its code has them; and keys of 2
    to 4 bits a channel beside KIVI."""
    window = "cache:sink=0,recent=0,block=64"
    table_5 = (
        ("FP16 Baseline", "dense"),
        (
            "KIVI-2-gs32-rs128",
            "k=kivi:bits=2,group_size=32+v=dense+cache:sink=0,recent=96,block=32",
        ),
        ("PolarQuant-m4n2", f"k=polarquant:preset=m4n2+v=dense+{window}"),
        ("KIVI-2-gs64-rs64", f"k=kivi:bits=2,group_size=64+v=dense+{window}"),
        ("KIVI-3-gs64-rs64", f"k=kivi:bits=3,group_size=64+v=dense+{window}"),
    )
    keys = ((name, f"k={cache}+v=dense+{SAME}") for name, cache in _keys())
    return Suite(
        "The PolarQuant paper's table of lower bits",
        (
            # no variants: outliers of whole pairs leave the codes of both kinds of keys as they
            # are, and values are exact
            listed(
                "PolarQuant, Table 5: keys in fewer bits, values in full precision",
                table_5,
                "KIVI-3-gs64-rs64",
            ),
            listed("Keys alone, the same windows", keys, "KIVI 4, groups of 128"),
        ),
    )


def _keys() -> Iterator[tuple[str, str]]:
    yield "full precision", "dense"
    yield "KIVI 4, groups of 128", "kivi:bits=4,group_size=128"
    yield "PolarQuant 4 + 4", "polarquant"
    yield "PolarQuant 4 + 4, square roots of radii", "polarquant:radius_scale=sqrt"
    yield "PolarQuant 4 + 4, fixed cut", "polarquant:cut=fixed"
    yield "PolarQuant 4 + 4, first version", "polarquant:grid=global"
    yield "KIVI 3, groups of 64", "kivi:bits=3,group_size=64"
    yield "PolarQuant 4 + 2", "polarquant:radius_bits=2,group_size=64"
    yield (
        "PolarQuant 4 + 2, square roots of radii",
        "polarquant:radius_bits=2,group_size=64,radius_scale=sqrt",
    )
    yield "PolarQuant 3 + 3", "polarquant:angle_bits=3,radius_bits=3,group_size=64"
    yield "KIVI 2, groups of 64", "kivi:bits=2,group_size=64"
    yield "PolarQuant 3 + 2", "polarquant:angle_bits=3,radius_bits=2,group_size=64"
    yield "PolarQuant 2 + 2", "polarquant:angle_bits=2,radius_bits=2,group_size=64"
