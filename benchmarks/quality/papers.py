"""The papers' tables, in the papers' layout, as far as a model of a few million parameters and a text can fill them.

Perplexity stands where some of them have the score of a task that such a model cannot do. Widths of groups and windows are the papers',
where the model's heads allow it.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.quality.comparison import Comparison, Entry, Suite, listed, swept

BITS = (4, 3, 2)
SINKS, RECENTS = (0, 16, 32, 64, 96), (0, 32, 64, 96, 128, 192)
RANKS, LAMBDAS = (5, 10, 20, 40, 60), ("1e-4", "5e-4", "1e-3", "1e-2", "1e-1")
PLAIN_INT = "datatype=int,outliers=0,pre_rope=false"  # what KVQuant's ablations of axes start from


# --- InnerQ -------------------------------------------------------------------------------------------------------------------------------


def innerq() -> Suite:
    """Tayaranian et al. (2026). 2 bits, groups of 32, 128 exact tokens."""
    methods = (
        ("Baseline", "dense"),
        ("KIVI", "kivi:sink=0,recent=128,block=32"),
        ("KIVI+sink", "kivi:sink=32,recent=96,block=32"),
        ("InnerQ", "innerq:sink=32,recent=96,block=32"),
    )
    modes = (("Asymmetric", "asym"), ("Symmetric", "sym"), ("Hybrid", "hybrid"), ("Hybrid, prefill only", "hybrid_prefill"))
    swept_methods = (("KIVI", "kivi:"), ("InnerQ, symmetric", "innerq:mode=sym,"), ("InnerQ, hybrid", "innerq:"))
    return Suite(
        "The InnerQ paper's tables of quality",
        (
            listed("InnerQ, Table 1: methods", methods, stressed=True),
            listed("InnerQ, Table 2: quantization mode", ((name, f"innerq:mode={mode}") for name, mode in modes), stressed=True),
            swept(
                "InnerQ, Figure 5a: exact first tokens, beside 96 recent ones",
                "w_sink",
                ((name, ((str(n), f"{cache}sink={n},recent=96,block=32") for n in SINKS)) for name, cache in swept_methods),
            ),
            swept(
                "InnerQ, Figure 5b: exact recent tokens, beside 32 first ones",
                "w_recent",
                ((name, ((str(n), f"{cache}sink=32,recent={n},block=32") for n in RECENTS)) for name, cache in swept_methods),
            ),
        ),
    )


# --- KVQuant ------------------------------------------------------------------------------------------------------------------------------


def kvquant() -> Suite:
    """Hooper et al. (2024)."""
    return Suite(
        "The KVQuant paper's tables of quality",
        (
            listed("KVQuant, Table 1: methods", _kvquant_methods(sink=1), stressed=True),
            listed("KVQuant, Table 17: data types", _kvquant_methods(sink=0)),
            Comparison("KVQuant, Table 9: axes", ("Datatype", "Key Dim.", "Value Dim."), tuple(_kvquant_axes()), stressed=True),
            Comparison("KVQuant, Tables 10 and 20: RoPE", ("Datatype", "Key Dim.", "Scheme"), tuple(_kvquant_rope()), stressed=True),
            listed("KVQuant, Table 11: levels", _kvquant_levels(), stressed=True),
            Comparison(
                "KVQuant, Table 12: outliers", ("Datatype", "% Outliers", "Outlier Dim."), tuple(_kvquant_outliers()), stressed=True
            ),
            Comparison(
                "KVQuant, Table 13: attention sink",
                ("Datatype", "Attention Sink-Aware"),
                tuple(
                    Entry((f"nuq{b}{suffix}", "O" if sink else "X"), f"kvquant:bits={b},outliers={fraction},sink={sink}")
                    for b in BITS
                    for suffix, fraction in (("", 0), ("-1%", 0.01))
                    for sink in (0, 1)
                ),
                stressed=True,
            ),
            Comparison(
                "KVQuant, Table 21: calibration text",
                ("Method", "Calibrated on"),
                tuple(
                    Entry((f"nuq{b}-1%", "the other text" if other else "the first text"), f"kvquant:bits={b}", other_text=other)
                    for b in BITS
                    for other in (False, True)
                ),
            ),
            listed(
                "Q-Norm",
                (
                    (f"nuq{b}-1%{', Q-Norm' if on == 'true' else ''}", f"kvquant:bits={b},qnorm={on}")
                    for b in BITS
                    for on in ("false", "true")
                ),
            ),
        ),
    )


def _kvquant_methods(sink: int) -> Iterator[tuple[str, str]]:
    """Groups of the whole token stand for Atom's 128 channels: no KV head pair of the small model is wider."""
    yield "baseline", "dense"
    for b in BITS:
        yield f"int{b}", f"int{b}"
        yield f"nf{b}", f"nf{b}"
        yield f"FlexGen-{b}bit (int, groups of 64)", f"int{b}:group_size=64"
        if not sink:
            yield f"nf{b}, groups of 64", f"nf{b}:group_size=64"
            yield f"kivi {b}", f"kivi:bits={b}"
        name = f"KVQuant-{b}bit" if sink else f"nuq{b}"
        yield name, f"kvquant:bits={b},outliers=0,sink={sink}"
        yield f"{name}-1%", f"kvquant:bits={b},outliers=0.01,sink={sink}"


def _kvquant_axes() -> Iterator[Entry]:
    yield Entry(("exact", "-", "-"), "dense")
    names = {"token": "PT", "channel": "PC"}
    for k, v in (("token", "token"), ("channel", "channel"), ("channel", "token")):
        yield Entry(("int3", names[k], names[v]), f"kvquant:bits=3,{PLAIN_INT},k_axis={k},v_axis={v}")


def _kvquant_rope() -> Iterator[Entry]:
    yield Entry(("exact", "-", "-"), "dense")
    for axis, cache in (("PC", "kvquant:bits=3,datatype=int,outliers=0,"), ("PT", "int3:")):
        for rope in (False, True):
            yield Entry(("int3", axis, "pre-RoPE" if rope else "post-RoPE"), f"{cache}pre_rope={str(rope).lower()}")


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
            yield Entry(("nuq3", f"{fraction:.0%}", name), f"kvquant:bits=3,outliers={fraction},thresholds={kind}")


# --- SQuat, PolarQuant --------------------------------------------------------------------------------------------------------------------


def squat() -> Suite:
    """Wang et al. (2025), appendix E.3. lambda = 0 is KIVI."""
    columns = (("KIVI", "kivi"), *((f"lambda={lam}", f"squat:lam={lam},solver=eigh") for lam in LAMBDAS))
    lines = (
        (f"r={rank}", ((name, f"{cache},rank={rank}" if "lam" in cache else cache) for name, cache in columns))
        for rank in RANKS
    )  # fmt: skip
    return Suite("The SQuat paper's table of hyper-parameters", (swept("SQuat, Table 3: lambda and rank", "rank", lines),))


def polarquant() -> Suite:
    """Wu et al. (2025), Table 5: keys alone, values exact, as its code has them; and KIVI with the same groups and window."""
    window = "cache:sink=0,recent=0,block=64"
    return Suite(
        "The PolarQuant paper's table of lower bits",
        (
            listed(
                "PolarQuant, Table 5: keys in fewer bits, values exact",
                (
                    ("FP16 Baseline", "dense"),
                    ("KIVI-2-gs32-rs128", "k=kivi:bits=2,group_size=32+v=dense+cache:sink=0,recent=96,block=32"),
                    ("PolarQuant-m4n2", f"k=polarquant:preset=m4n2+v=dense+{window}"),
                    ("KIVI-2-gs64-rs64", f"k=kivi:bits=2,group_size=64+v=dense+{window}"),
                    ("KIVI-3-gs64-rs64", f"k=kivi:bits=3,group_size=64+v=dense+{window}"),
                ),
                stressed=True,
            ),
        ),
    )


# --- XQuant -------------------------------------------------------------------------------------------------------------------------------

XQUANT_WINDOW = "sink=0,recent=0,block=128"
SHARED = {"kivi": "group_size=64,pre_rope=true", "xquant": "group_size=64"}


def xquant(title: str, pairs: str) -> Suite:
    """Tomar et al. (2025), all with groups of 64, blocks of 128 and no other window. `pairs` are bits of xquant and of caches of keys and
    values at equal bytes: 4:2 8:4."""
    bits = tuple((int(b), int(kv)) for b, kv in (pair.split(":") for pair in pairs.split()))
    low = tuple((b, kv) for b, kv in bits if b < 4)
    first = (
        listed(f"XQuant, Table 4: {'the first layer' if last == 0 else 'two of four layers'} in 4 bits", _xquant_first(low, last), True)
        for last in (0, 1)
    )
    return Suite(
        title,
        (
            listed("XQuant, Table 1: equal bytes", _xquant_equal_bytes(bits), stressed=True),
            *first,
            listed("What is accumulated, as wide as the model", _xquant_readings(bits)),
            listed("Latents or the layer input", _xquant_latents(bits)),
            listed("XQuant, Table B.1: the outlier channel", _xquant_outlier_channel(bits)),
        ),
    )


def _xquant_equal_bytes(bits: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    yield "Baseline", f"dense:{XQUANT_WINDOW}"
    for b, kv in bits:
        yield f"KIVI*-{kv}bit", f"kivi:bits={kv},{SHARED['kivi']},{XQUANT_WINDOW}"
        yield f"KVQuant-{kv}bit-1%", f"kvquant:bits={kv},{XQUANT_WINDOW}"
        yield f"XQuant-{b}bit", f"xquant:bits={b},{SHARED['xquant']},{XQUANT_WINDOW}"


def _xquant_first(low: tuple[tuple[int, int], ...], last: int) -> Iterator[tuple[str, str]]:
    yield "baseline", f"dense:{XQUANT_WINDOW}"
    for b, kv in low:
        for name, n, label in (("kivi", kv, "KIVI*"), ("xquant", b, "XQuant")):
            yield f"{label}-{n}bit", f"{name}:bits=4@0-{last}/{n},{SHARED[name]},{XQUANT_WINDOW}"
        yield f"KVQuant-{kv}bit-1%", f"kvquant:bits={kv},{XQUANT_WINDOW}"
        for reading in ("post_norm", "unit_norm"):
            options = f"bits={b},base_layer={last},reading={reading},group_size=64"
            yield f"XQuant-CL-{b}bit, {reading}", f"xquant_cl:{options},{XQUANT_WINDOW}"


def _xquant_readings(bits: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    for b, _ in bits:
        for reading in ("post_norm", "unit_norm", "residual_stream"):
            options = f"bits={b},base_layer=0,latent=false,reading={reading},group_size=64"
            yield f"xquant_cl {b}, {reading}", f"xquant_cl:{options},{XQUANT_WINDOW}"


def _xquant_latents(bits: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    for b, _ in bits:
        for latent, label in (("true", "latents"), ("false", "the layer input")):
            yield f"xquant {b}, {label}", f"xquant:bits={b},latent={latent},group_size=64,{XQUANT_WINDOW}"


def _xquant_outlier_channel(bits: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str]]:
    for b, _ in bits:
        for outlier, label in (("false", ""), ("true", ", the first channel of keys exact")):
            options = f"bits={b},latent=true,exact_outlier_channel={outlier},group_size=64"
            yield f"xquant {b}, latents{label}", f"xquant:{options},{XQUANT_WINDOW}"
