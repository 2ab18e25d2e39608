"""XQuant: Tomar et al. (2025)."""

from __future__ import annotations

from collections.abc import Iterator

from laboratory.quality.comparison import Suite, listed

BITS = (4, 3, 2)
BASE_LAYER = 2  # the paper's third layer
XQUANT_WINDOW = "sink=0,recent=0,block=128"
SHARED = {"kivi": "group_size=64,pre_rope=true", "xquant": "group_size=64"}


def xquant() -> Suite:
    """Return the tables of the XQuant paper for models whose KV heads are shared, where latents
    take as many bytes as keys and values: all with groups of 64, blocks of 128 and no other
    window."""
    return Suite(
        "Quality of XQuant, KV heads shared",
        (
            listed(
                "XQuant, Table 1: equal bytes",
                _xquant_equal_bytes(),
                "KIVI*-2bit",
                stressed=True,
                fake=True,
            ),
            listed(
                "XQuant, Table 4: the first layers up to 2 in 4 bits",
                _xquant_first(),
                "KIVI*-2bit",
                stressed=True,
                fake=True,
            ),
            listed("XQuant, Table B.1: the outlier channel", _xquant_outlier_channel(), fake=True),
        ),
    )


def _xquant_equal_bytes() -> Iterator[tuple[str, str]]:
    yield "Baseline", f"dense:{XQUANT_WINDOW}"
    for b in BITS:
        yield f"KIVI*-{b}bit", f"kivi:bits={b},{SHARED['kivi']},{XQUANT_WINDOW}"
        yield f"KVQuant-{b}bit-1%", f"kvquant:bits={b},{XQUANT_WINDOW}"
        yield f"XQuant-{b}bit", f"xquant:bits={b},{SHARED['xquant']},{XQUANT_WINDOW}"


def _xquant_first() -> Iterator[tuple[str, str]]:
    yield "baseline", f"dense:{XQUANT_WINDOW}"
    for b in BITS[1:]:
        for name, label in (("kivi", "KIVI*"), ("xquant", "XQuant")):
            yield (
                f"{label}-{b}bit",
                f"{name}:bits=4@0-{BASE_LAYER}/{b},{SHARED[name]},{XQUANT_WINDOW}",
            )
        yield f"KVQuant-{b}bit-1%", f"kvquant:bits={b},{XQUANT_WINDOW}"
        for reading in ("post_norm", "unit_norm"):
            options = f"bits={b},base_layer={BASE_LAYER},reading={reading},group_size=64"
            yield f"XQuant-CL-{b}bit, {reading}", f"xquant_cl:{options},{XQUANT_WINDOW}"


def _xquant_outlier_channel() -> Iterator[tuple[str, str]]:
    for b in BITS:
        for outlier, label in (("false", ""), ("true", ", the first channel of keys exact")):
            options = f"bits={b},latent=true,exact_outlier_channel={outlier},group_size=64"
            yield f"xquant {b}, latents{label}", f"xquant:{options},{XQUANT_WINDOW}"
