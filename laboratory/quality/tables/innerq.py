"""InnerQ: Tayaranian et al. (2026). 2 bits, groups of 32, 128 full-precision tokens."""

from __future__ import annotations

from collections.abc import Iterator

from laboratory.quality.comparison import Comparison, Entry, Suite, listed, swept

WINDOWS = "sink=32,recent=96,block=32"
SINKS, RECENTS = (0, 32, 96), (0, 96, 192)
MODES = (
    ("Asymmetric", "asym"),
    ("Symmetric", "sym"),
    ("Hybrid", "hybrid"),
    ("Hybrid, prefill only", "hybrid_prefill"),
)
SWEPT = (
    ("KIVI", "kivi:"),
    ("InnerQ, symmetric", "innerq:mode=sym,"),
    ("InnerQ, hybrid", "innerq:"),
)


def innerq() -> Suite:
    """Return the tables of quality of the InnerQ paper, and its methods at equal stored bits."""
    methods = (
        ("Baseline", "dense"),
        ("KIVI", "kivi:sink=0,recent=128,block=32"),
        ("KIVI+sink", f"kivi:{WINDOWS}"),
        ("InnerQ", f"innerq:{WINDOWS}"),
        ("InnerQ, keys not normalized", f"innerq:normalize=false,{WINDOWS}"),
    )
    return Suite(
        "The InnerQ paper's tables of quality",
        (
            listed("InnerQ, Table 1: methods", methods, "KIVI+sink", stressed=True),
            listed(
                "InnerQ, Table 1 at equal stored bits", _equal_bits(), "KIVI, 3 bits", stressed=True
            ),
            Comparison(
                "InnerQ, Table 2: quantization mode", ("mode",), tuple(_modes()), stressed=True
            ),
            swept(
                "InnerQ, Figure 5a: full-precision first tokens, beside 96 recent ones",
                "w_sink",
                (
                    (name, ((str(n), f"{cache}sink={n},recent=96,block=32") for n in SINKS))
                    for name, cache in SWEPT
                ),
            ),
            swept(
                "InnerQ, Figure 5b: full-precision recent tokens, beside 32 first ones",
                "w_recent",
                (
                    (name, ((str(n), f"{cache}sink=32,recent={n},block=32") for n in RECENTS))
                    for name, cache in SWEPT
                ),
            ),
        ),
    )


def _modes() -> Iterator[Entry]:
    for name, mode in MODES:
        for on in ("true", "false"):
            yield Entry(
                (name,),
                f"innerq:mode={mode},normalize={on},{WINDOWS}",
                "norm" if on == "true" else "no norm",
            )


def _equal_bits() -> Iterator[tuple[str, str]]:
    """Yield caches of 2.5, 3.0, 3.5 and 4.0 stored bits. The paper's 2 bits leave the sign out, and
    a hybrid group has a zero point too."""
    yield "InnerQ, 1 bit and the sign", f"innerq:bits=1,mode=sym,{WINDOWS}"
    yield (
        "KIVI, 2 bits, groups of 64",
        f"kivi:bits=2,group_size=64,{WINDOWS.replace('block=32', 'block=64')}",
    )
    yield "InnerQ, 2 bits, asymmetric", f"innerq:bits=2,mode=asym,{WINDOWS}"
    yield "InnerQ, 1 bit, hybrid", f"innerq:bits=1,{WINDOWS}"
    yield "KIVI, 2 bits", f"kivi:bits=2,{WINDOWS}"
    yield "InnerQ, 2 bits and the sign", f"innerq:bits=2,mode=sym,{WINDOWS}"
    yield (
        "KIVI, 3 bits, groups of 64",
        f"kivi:bits=3,group_size=64,{WINDOWS.replace('block=32', 'block=64')}",
    )
    yield "InnerQ, 2 bits, hybrid", f"innerq:bits=2,{WINDOWS}"
    yield "KIVI, 3 bits", f"kivi:bits=3,{WINDOWS}"
