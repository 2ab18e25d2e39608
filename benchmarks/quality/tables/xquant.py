"""XQuant: Tomar et al. (2025)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.quality.comparison import Suite, listed

XQUANT_WINDOW = "sink=0,recent=0,block=128"
SHARED = {"kivi": "group_size=64,pre_rope=true", "xquant": "group_size=64"}


def xquant(title: str, pairs: str, first_layers: tuple[int, ...]) -> Suite:
    """Return the tables of the XQuant paper: all with groups of 64, blocks of 128 and no other window. `pairs` are bits of xquant and of
    caches of keys and values at equal bytes: 4:2 8:4. first_layers: for Table 4, the number of first layers that take 4 bits."""
    bits = tuple((int(b), int(kv)) for b, kv in (pair.split(":") for pair in pairs.split()))
    low = tuple((b, kv) for b, kv in bits if b < 4)
    kivi = f"KIVI*-{bits[-1][1]}bit"
    first = (
        listed(f"XQuant, Table 4: the first layers up to {n - 1} in 4 bits", _xquant_first(low, n - 1), kivi, stressed=True)
        for n in first_layers
    )
    return Suite(
        title,
        (
            listed("XQuant, Table 1: equal bytes", _xquant_equal_bytes(bits), kivi, stressed=True, fake=True),
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
