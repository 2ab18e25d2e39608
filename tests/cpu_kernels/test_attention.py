"""The C++ kernel by itself: every layout of words against attention by its definition, and what it
refuses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import attention as native
from cpu_kernels import library
from tests.cpu_kernels.random_bodies import Case, attention

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)


def rows(channels: int, dtype: str) -> Case:
    return Case(0, channels, 1, "channels", 1, scale_dtype=dtype, form="rows")


def polar(bits: int, angle_bits: int, channels: int, *, group: int, **options) -> Case:
    return Case(
        bits, channels, 32, "token groups", group, form="polar", angle_bits=angle_bits, **options
    )


def runs(channels: int, block: int, rotated: bool = False, **widths: int) -> Case:
    """Return a body in runs; widths: the channels with one, two, ... bits."""
    names = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    stored = tuple(widths.get(name, 0) for name in names)
    return Case(
        0, channels, block, "channels", 1, form="runs", rotated=rotated, run_channels=stored
    )


CASES = {
    "2 bits, 64": (Case(2, 64, 32, "token groups", 32), Case(2, 64, 32, "channel groups", 32)),
    "2 bits, 128": (Case(2, 128, 32, "token groups", 32), Case(2, 128, 32, "channel groups", 32)),
    "4 bits, 128": (Case(4, 128, 128, "token groups", 64), Case(4, 128, 128, "channel groups", 64)),
    "3 bits, 128": (
        Case(3, 128, 32, "channel groups", 32, centre=3),
        Case(3, 128, 32, "token groups", 32, centre=3),
    ),
    "3 bits, 64": (Case(3, 64, 32, "channel groups", 32), Case(3, 64, 32, "token groups", 32)),
    "5 and 9 bits": (
        Case(5, 64, 32, "channel groups", 16, centre=15),
        Case(9, 64, 32, "token groups", 16, centre=255),
    ),
    "8 bits": (
        Case(8, 96, 32, "token groups", 32, scale_dtype="bfloat16"),
        Case(8, 96, 32, "channel groups", 8, scale_dtype="float32"),
    ),
    "1 and 6 bits": (Case(1, 64, 16, "token groups", 4), Case(6, 64, 16, "channel groups", 4)),
    "head dim 80": (Case(4, 80, 32, "token groups", 32), Case(2, 80, 32, "channel groups", 16)),
    "head dim 8": (Case(2, 8, 8, "token groups", 8), Case(3, 8, 8, "channel groups", 8)),
    "blocks of 12": (Case(4, 32, 12, "token groups", 12), Case(2, 32, 12, "channel groups", 2)),
    "groups of 96": (Case(3, 256, 96, "token groups", 96), Case(4, 256, 96, "token groups", 48)),
    "heads together": (
        Case(4, 64, 8, "channel groups", 64, heads=2),
        Case(3, 64, 8, "channel groups", 64, heads=2),
    ),
    "tables": (
        Case(4, 64, 32, "channels", 1, scale_dtype="float32", table=True),
        Case(3, 64, 32, "channel groups", 32, table=True),
    ),
    "tables, too": (
        Case(2, 64, 32, "channel groups", 8, table=True),
        Case(2, 64, 32, "channels", 1, scale_dtype="float32", table=True),
    ),
    "dense fp32": (rows(64, "float32"), rows(64, "float32")),
    "dense, head dim 80": (rows(80, "bfloat16"), rows(80, "float32")),
    "dense, 16 bits": (rows(128, "bfloat16"), rows(128, "float16")),
    "before RoPE": (
        Case(3, 64, 32, "token groups", 16, rotated=True),
        Case(2, 64, 32, "channel groups", 32),
    ),
    "before RoPE, head dim 80": (
        Case(4, 80, 12, "channel groups", 8, rotated=True),
        Case(4, 80, 12, "channel groups", 16),
    ),
    "before RoPE, tables": (
        Case(4, 64, 32, "channels", 1, scale_dtype="float32", table=True, rotated=True, pool=32),
        Case(
            3, 64, 32, "channel groups", 64, heads=2, table=True, pool=16, residual_dtype="float32"
        ),
    ),
    "outliers": (
        Case(4, 32, 12, "channel groups", 32, table=True, pool=12),
        Case(2, 32, 12, "channels", 1, scale_dtype="float32", table=True, pool=4),
    ),
    "polar": (polar(8, 4, 64, group=32), rows(64, "float32")),
    "polar, 6 bits": (polar(6, 4, 128, group=16), Case(4, 128, 32, "channel groups", 32)),
    "polar, 12 bits": (
        polar(12, 6, 16, group=8, root=True, scale_dtype="float32"),
        Case(2, 16, 32, "channel groups", 16),
    ),
    "runs": (
        runs(64, 32, True, five=8, four=8, three=8, two=16, one=8),
        runs(64, 32, six=8, three=24, two=8, one=16),
    ),
    "runs of all widths": (
        runs(128, 32, True, eight=16, seven=8, six=24, five=8, four=16, three=8, two=24, one=24),
        runs(128, 32, eight=8, seven=24, six=8, five=16, four=8, three=24, two=8, one=8),
    ),
    "runs of some channels": (runs(80, 16, True, three=10, one=20), runs(80, 16, two=6)),
    "runs, blocks of 8": (runs(16, 8, True, eight=2, four=4, two=6), runs(16, 8, six=4, four=12)),
    "runs, blocks of 16": (
        runs(64, 16, True, seven=8, four=16, three=16, two=8, one=8),
        runs(64, 48, eight=16, five=8, three=24, two=16),
    ),
    "runs of keys alone": (runs(32, 48, True, two=32), Case(2, 32, 48, "channel groups", 32)),
}
BATCH, HEADS = 3, 2


def inputs(case: str, group: int, tokens: int, capacity: int, seed: int = 0):
    """Return (q, stored keys, stored values, vectors of both)."""
    k, v = CASES[case]
    q = (
        np.random.default_rng(seed)
        .normal(size=(BATCH, HEADS, group * tokens, k.channels))
        .astype(np.float32)
    )
    (keys, k_hat), (values, v_hat) = (
        side.random(BATCH, HEADS, capacity, seed + i) for i, side in enumerate((k, v), 1)
    )
    return q, keys, values, k_hat, v_hat


def decode_attention(q, keys, values, limits, *, capacity: int):
    """Call the kernel with NumPy arrays."""
    (k, k_arrays), (v, v_arrays) = keys, values
    arrays = jax.tree.map(jnp.asarray, (q, k_arrays, v_arrays, limits))
    return native.decode_attention(
        arrays[0], (k, arrays[1]), (v, arrays[2]), arrays[3], capacity=capacity
    )


def relative_errors(actual, expected) -> np.ndarray:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected, axis=-1) / np.maximum(
        np.linalg.norm(expected, axis=-1), 1e-30
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 1), (7, 1), (2, 3)])
def test_every_layout_is_read_as_it_was_written(case: str, group: int, tokens: int):
    k, v = CASES[case]
    block = int(np.lcm(k.block, v.block))
    capacity = max((1100 if case == "2 bits, 64" else 120) // block, 1) * block
    q, keys, values, k_hat, v_hat = inputs(case, group, tokens, capacity)
    limits = np.array(
        [[0] * tokens, range(capacity - tokens + 1, capacity + 1), range(33, 33 + tokens)], np.int32
    )
    m, l, o = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=capacity)
    want_m, want_l, want_o = attention(q, k_hat, v_hat, limits)
    assert np.all(np.asarray(o)[0] == 0)
    assert np.all(np.asarray(l)[0] == 0)
    assert np.all(np.asarray(m)[0] == np.float32(-1e30)), "rows that see nothing"
    np.testing.assert_allclose(m[1:], want_m[1:], rtol=1e-5, atol=1e-5)
    found, want = np.asarray(o)[1:] / np.asarray(l)[1:], want_o[1:] / want_l[1:]
    assert relative_errors(found, want).max() < 1e-5, (
        f"worst relative error {relative_errors(found, want).max():.1e}"
    )
    fewer = attention(q, k_hat, v_hat, limits - 1)
    assert relative_errors(found, (fewer[2] / np.maximum(fewer[1], 1e-30))[1:]).min() > 1e-4, (
        "one token too few passes"
    )


def test_what_lies_beyond_the_limits_is_never_used():
    k, v = CASES["2 bits, 64"]
    q, keys, values, *_ = inputs("2 bits, 64", 4, 1, 96)
    limits = np.array([[32], [64], [0]], np.int32)
    clean = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    for row, limit in enumerate(limits[:, 0]):
        for side, stored in ((k, keys), (v, values)):
            stored[0] = stored[0].copy()
            stored[0][row, :, limit // side.body.slots :] = -1
            for i in (1, 2):
                stored[i] = stored[i].copy()
                where = (
                    (row, slice(None), slice(limit // 32, None))
                    if side is k
                    else (row, slice(None), slice(None), slice(limit, None))
                )
                stored[i][where] = 0x7E00  # nan
    spoiled = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    for one, other in zip(clean, spoiled, strict=True):
        np.testing.assert_array_equal(one, other)
    later = decode_attention(q, (k.body, keys), (v.body, values), limits + 1, capacity=96)
    assert np.isnan(np.asarray(later[2])).any(), "the check above sees nothing"


@pytest.mark.parametrize("dtype", native.WINDOW_DTYPES)
@pytest.mark.parametrize(
    ("case", "slots"),
    [("2 bits, 64", (32, 130)), ("head dim 80", (0, 7)), ("head dim 8", (5, 129))],
)
def test_windows_are_attended_to_with_the_body(case: str, slots: tuple[int, int], dtype: str):
    k, v = CASES[case]
    q, keys, values, k_hat, v_hat = inputs(case, 6, 1, 96)
    limits = np.array([[0], [96], [32]], np.int32)
    rng = np.random.default_rng(7)
    seen = rng.random((BATCH, sum(slots))) < 0.7
    seen[:, :3], seen[:, -1] = True, False
    rows = [
        np.asarray(
            jnp.asarray(rng.normal(size=(BATCH, HEADS, sum(slots), k.channels)), dtype), np.float32
        )
        for _ in range(2)
    ]
    window_q = rng.normal(size=q.shape).astype(
        np.float32
    )  # another query than that of the body, as a method with a key norm has

    def attend(seen: np.ndarray, stored: list[np.ndarray]) -> np.ndarray:
        parts = [
            tuple(jnp.asarray(part, dtype) for part in np.split(side, [slots[0]], axis=2))
            for side in stored
        ]
        windows = native.Windows(jnp.asarray(window_q), jnp.asarray(seen), *parts)
        (kb, k_arrays), (vb, v_arrays) = (k.body, keys), (v.body, values)
        arrays = jax.tree.map(jnp.asarray, (q, k_arrays, v_arrays, limits))
        m, l, o = native.decode_attention(
            arrays[0], (kb, arrays[1]), (vb, arrays[2]), arrays[3], capacity=96, windows=windows
        )
        return np.asarray(o / l)

    spoiled = [np.where(seen[:, None, :, None], side, np.nan) for side in rows]
    found = attend(seen, spoiled)
    body = attention(q, k_hat, v_hat, limits)
    scores = np.where(
        seen[:, None, None],
        np.einsum("bkrh,bksh->bkrs", window_q.astype(np.float64), rows[0]) * k.channels**-0.5,
        -np.inf,
    )
    m = np.maximum(body[0], scores.max(-1, keepdims=True))
    weights, shrink = np.exp(scores - m), np.exp(body[0] - m)
    want = (np.einsum("bkrs,bksh->bkrh", weights, rows[1]) + shrink * body[2]) / (
        weights.sum(-1, keepdims=True) + shrink * body[1]
    )
    assert relative_errors(found, want).max() < 1e-5, (
        f"worst relative error {relative_errors(found, want).max():.1e}"
    )
    fewer = seen.copy()
    fewer[:, 0] = False
    assert relative_errors(attend(fewer, spoiled), want).max() > 1e-4, "a token left out passes"


def refused(*args, **kwargs) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(decode_attention(*args, **kwargs))
    return str(caught.value)


@pytest.mark.usefixtures("types_unchecked")
def test_arrays_that_do_not_fit_are_an_error():
    k, v = CASES["3 bits, 64"]
    q, keys, values, *_ = inputs("3 bits, 64", 4, 1, 96)
    limits = np.full((BATCH, 1), 96, np.int32)
    good = dict(capacity=96)
    jax.block_until_ready(decode_attention(q, (k.body, keys), (v.body, values), limits, **good))
    assert "words of keys must be" in refused(
        q, (k.body, [keys[0][:, :, :-1], *keys[1:]]), (v.body, values), limits, **good
    )
    assert "words of keys must be" in refused(
        q, (k.body, [keys[0].astype(np.int32), *keys[1:]]), (v.body, values), limits, **good
    )
    assert "scale of values must be" in refused(
        q, (k.body, keys), (v.body, [*values[:2], values[2][:, :1], values[3]]), limits, **good
    )
    assert "scale of keys must be" in refused(
        q,
        (k.body, [*keys[:2], keys[2].view(np.float16), keys[3]]),
        (v.body, values),
        limits,
        **good,
    )
    assert "zero point of values is missing" in refused(
        q, (k.body, keys), (v.body, values[:-1]), limits, **good
    )
    assert "too many arrays" in refused(
        q, (k.body, keys), (v.body, [*values, values[-1]]), limits, **good
    )
    assert "limits must be [B, T]" in refused(
        q, (k.body, keys), (v.body, values), limits[:2], **good
    )
    assert "no whole number" in refused(q, (k.body, keys), (v.body, values), limits, capacity=97)
    assert "words of keys must be" in refused(
        q, (k.body, keys), (v.body, values), limits, capacity=192
    )
    for field, wrong in (
        ("bits", 12),
        ("width", 24),
        ("span", 64),
        ("slots", 3),
        ("group", 0),
        ("heads", 0),
        ("chunks", 1 << 40),
    ):
        body = dataclasses.replace(k.body, **{field: wrong})
        assert "kvq_decode_attention: " in refused(
            q, (body, keys), (v.body, values), limits, **good
        ), f"{field}={wrong}"


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("case", "last", "reason"),
    [
        ("dense fp32", "rows of keys", "rows of keys must be"),
        ("before RoPE", "positions of keys", "positions of keys must be"),
        ("outliers", "ends", "ends of the outliers of keys must be"),
        ("polar", "angles", "zero point of the angles of keys must be"),
        ("runs", "far positions", "far positions of keys must be"),
    ],
)
def test_arrays_of_other_forms_that_do_not_fit_are_an_error(case: str, last: str, reason: str):
    k, v = CASES[case]
    q, keys, values, *_ = inputs(case, 4, 1, 96)
    limits = np.full((BATCH, 1), 96, np.int32)
    jax.block_until_ready(
        decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    )
    assert reason in refused(
        q, (k.body, [*keys[:-1], keys[-1][:, :-1]]), (v.body, values), limits, capacity=96
    ), f"{last} cut short"
    assert reason in refused(
        q, (k.body, [*keys[:-1], keys[-1].astype(np.int32)]), (v.body, values), limits, capacity=96
    ), f"{last} as integers"
    for field, wrong in (
        ("form", "rows" if k.form == "polar" else "polar"),
        ("pool", 7),
        ("rotated", True),
        ("angle_bits", 9),
    ):
        if getattr(k.body, field) == wrong:
            continue
        body = dataclasses.replace(k.body, **{field: wrong})
        assert "kvq_decode_attention: " in refused(
            q, (body, keys), (v.body, values), limits, capacity=96
        ), f"{field}={wrong}"


@pytest.mark.usefixtures("types_unchecked")
def test_arrays_of_runs_that_do_not_fit_are_an_error():
    k, v = CASES["runs"]
    q, keys, values, *_ = inputs("runs", 4, 1, 96)
    limits = np.full((BATCH, 1), 96, np.int32)
    jax.block_until_ready(
        decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    )
    wrong = {
        "mean of values": -1,
        "synthesis of values": -2,
        "steps of values": -3,
        "exponents of values": -4,
        "words of values": 0,
    }
    for name, at in wrong.items():
        spoiled = list(values)
        spoiled[at] = spoiled[at][..., :-1]
        assert f"{name} must be" in refused(
            q, (k.body, keys), (v.body, spoiled), limits, capacity=96
        )
    for stored in ((3,) + (0,) * 7, (0,) * 8, (66,) + (0,) * 7, (-2, 66) + (0,) * 6):
        body = dataclasses.replace(v.body, run_channels=stored)
        assert "unknown runs" in refused(q, (k.body, keys), (body, values), limits, capacity=96), (
            f"{stored}"
        )
    assert "unknown runs" in refused(
        q, (k.body, keys), (dataclasses.replace(v.body, span=8), values), limits, capacity=96
    )


def test_places_outside_the_row_are_not_written_to():
    k, v = CASES["runs"]
    q, keys, values, *_ = inputs("runs", 4, 1, 96)
    places = next(i for i, array in enumerate(keys) if array.dtype == np.int32)
    for place in (-(2**31), 2**31 - 1):
        keys[places] = np.full_like(keys[places], place)
        m, *_ = decode_attention(
            q, (k.body, keys), (v.body, values), np.full((BATCH, 1), 96, np.int32), capacity=96
        )
        assert np.all(np.isfinite(m))


def test_no_outlier_is_written_outside_the_vectors():
    k, v = CASES["outliers"]
    q, keys, values, *_ = inputs("outliers", 4, 1, 96)
    for stored in (keys, values):
        stored[-3], stored[-1] = np.full_like(stored[-3], 65535), np.full_like(stored[-1], 65535)
    limits = np.array([[96], [12], [0]], np.int32)
    m, l, _ = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    assert np.all(np.isfinite(m))
    assert np.all(np.asarray(l)[2] == 0)


def test_limits_outside_the_capacity_read_no_more_than_it():
    k, v = CASES["2 bits, 64"]
    q, keys, values, *_ = inputs("2 bits, 64", 1, 1, 96)
    call = jax.jit(
        lambda limits: decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    )
    whole, more = (call(jnp.full((BATCH, 1), limit, jnp.int32)) for limit in (96, 2**31 - 1))
    np.testing.assert_array_equal(whole[2], more[2])
    assert np.all(np.asarray(call(jnp.full((BATCH, 1), -5, jnp.int32))[2]) == 0)
