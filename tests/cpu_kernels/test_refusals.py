"""The C++ kernel refuses arrays that do not fit the description of their body."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from cpu_kernels import library
from tests.cpu_kernels.body_cases import (
    BATCH,
    CASES,
    decode_attention,
    inputs,
)

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)


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
