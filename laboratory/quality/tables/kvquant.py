"""KVQuant: Hooper et al. (2024)."""

from __future__ import annotations

from collections.abc import Iterator

from laboratory.quality.comparison import Comparison, Entry, Suite, listed

BITS = (4, 3, 2)
PLAIN_INT = "datatype=int,outliers=0,pre_rope=false"  # what KVQuant's ablations of axes start from


def kvquant() -> Suite:
    """Return the paper's tables of quality. Table 18 is Table 1 for more models; Table 14, keys
    calibrated online."""
    return Suite(
        "The KVQuant paper's tables of quality",
        (
            listed(
                "KVQuant, Table 1: methods",
                _kvquant_methods(sink=1),
                "KVQuant-3bit-1%",
                stressed=True,
                fake=True,
            ),
            listed("KVQuant, Table 17: data types", _kvquant_methods(sink=0), "nuq3-1%", fake=True),
            Comparison(
                "KVQuant, Table 9: axes",
                ("Datatype", "Key Dim.", "Value Dim."),
                tuple(_kvquant_axes()),
                stressed=True,
                fake=True,
            ),
            Comparison(
                "KVQuant, Tables 10 and 20: RoPE",
                ("Datatype", "Key Dim.", "Scheme"),
                tuple(_kvquant_rope()),
                stressed=True,
                fake=True,
            ),
            listed(
                "KVQuant, Table 11: levels",
                _kvquant_levels(),
                "nuq3 (KVQuant)",
                stressed=True,
                fake=True,
            ),
            Comparison(
                "KVQuant, Table 12: outliers",
                ("Datatype", "% Outliers", "Outlier Dim."),
                tuple(_kvquant_outliers()),
                stressed=True,
                fake=True,
            ),
            Comparison(  # not in one pass, which leaves no token exact
                "KVQuant, Table 13: attention sink",
                ("Datatype", "Attention Sink-Aware"),
                tuple(
                    Entry(
                        (f"nuq{b}{suffix}", "O" if sink else "X"),
                        f"kvquant:bits={b},outliers={fraction},sink={sink}",
                    )
                    for b in BITS
                    for suffix, fraction in (("", 0), ("-1%", 0.01))
                    for sink in (0, 1)
                ),
                stressed=True,
            ),
            Comparison(
                "KVQuant, Table 14: ranges of channels",
                ("Datatype", "% Outliers", "Ranges of K"),
                tuple(_kvquant_ranges()),
                against=("nuq3", "1%", "Offline"),
                fake=True,
            ),
            Comparison(
                "KVQuant, Table 21: calibration text",
                ("Method", "Calibrated on"),
                tuple(
                    Entry(
                        (f"nuq{b}-1%", "the other text" if other else "the first text"),
                        f"kvquant:bits={b}",
                        other_text=other,
                    )
                    for b in BITS
                    for other in (False, True)
                ),
                fake=True,
            ),
            listed(
                "Q-Norm",
                (("nuq2-1%", "kvquant:bits=2"), ("nuq2-1%, Q-Norm", "kvquant:bits=2,qnorm=true")),
                "nuq2-1%",
            ),
        ),
    )


def _kvquant_methods(sink: int) -> Iterator[tuple[str, str]]:
    """Yield Table 1's methods, whose first token is exact, or Table 17's. Groups of a whole token
    stand for Atom's 128 channels."""
    yield "baseline", "dense"
    for b in BITS:
        yield f"int{b}", f"int{b}"
        yield f"nf{b}", f"nf{b}"
        yield f"FlexGen-{b}bit (int, groups of 64)", f"int{b}:group_size=64"
        if not sink:
            yield f"kivi {b}", f"kivi:bits={b}"
        name = f"KVQuant-{b}bit" if sink else f"nuq{b}"
        yield name, f"kvquant:bits={b},outliers=0,sink={sink}"
        yield f"{name}-1%", f"kvquant:bits={b},outliers=0.01,sink={sink}"


def _kvquant_axes() -> Iterator[Entry]:
    yield Entry(("exact", "-", "-"), "dense")
    names = {"token": "PT", "channel": "PC"}
    for k, v in (("token", "token"), ("channel", "channel"), ("channel", "token")):
        yield Entry(
            ("int3", names[k], names[v]), f"kvquant:bits=3,{PLAIN_INT},k_axis={k},v_axis={v}"
        )


def _kvquant_rope() -> Iterator[Entry]:
    yield Entry(("exact", "-", "-"), "dense")
    for axis, cache in (("PC", "kvquant:bits=3,datatype=int,outliers=0,"), ("PT", "int3:")):
        for rope in (False, True):
            yield Entry(
                ("int3", axis, "pre-RoPE" if rope else "post-RoPE"),
                f"{cache}pre_rope={str(rope).lower()}",
            )


def _kvquant_ranges() -> Iterator[Entry]:
    """Yield keys with ranges of the calibration text (offline) and of the sequence itself (online:
    its prompt's, in `fake` all of it)."""
    yield Entry(("exact", "-", "-"), "dense")
    for percent, fraction in (("-", 0), ("1%", 0.01)):
        for name, ranges in (("Online", "prompt"), ("Offline", "calibrated")):
            yield Entry(
                ("nuq3", percent, name),
                f"kvquant:bits=3,outliers={fraction},channel_ranges={ranges}",
            )


def _kvquant_levels() -> Iterator[tuple[str, str]]:
    yield "baseline", "dense"
    for label, options in (
        ("int3", "datatype=int"),
        ("nf3", "datatype=nf"),
        ("nuq3 (unweighted)", "weighting=none"),
        ("nuq3 (Fisher-weighted)", "weighting=fisher"),
        ("nuq3 (KVQuant)", "weighting=fisher_scale"),
    ):
        yield label, f"kvquant:bits=3,outliers=0,{options}"


def _kvquant_outliers() -> Iterator[Entry]:
    yield Entry(("exact", "-", "-"), "dense")
    yield Entry(("nuq3", "-", "-"), "kvquant:bits=3,outliers=0")
    for fraction in (0.01, 0.03):
        for kind, name in (("matrix", "PM"), ("vector", "PV")):
            yield Entry(
                ("nuq3", f"{fraction:.0%}", name),
                f"kvquant:bits=3,outliers={fraction},thresholds={kind}",
            )
