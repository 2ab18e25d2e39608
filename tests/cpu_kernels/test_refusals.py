"""The C++ kernel refuses arrays that do not fit the description of their body."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from cpu_kernels import attention as native
from cpu_kernels import library
from tests.cpu_kernels.body_cases import BATCH, CASES, decode_attention, inputs

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("types_unchecked")


@dataclasses.dataclass
class Call:
    """A call that the kernel takes, to be changed."""

    q: np.ndarray
    bodies: list[Any]
    sides: list[list[np.ndarray]]
    limits: np.ndarray
    capacity: int = 96

    def run(self) -> None:
        keys, values = zip(self.bodies, self.sides, strict=True)
        out = decode_attention(self.q, keys, values, self.limits, capacity=self.capacity)
        jax.block_until_ready(out)

    def refused(self) -> str:
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            self.run()
        return str(caught.value)


def call_of(case: str) -> Call:
    q, keys, values, *_ = inputs(case, 4, 1, 96)
    bodies = [side.body for side in CASES[case]]
    call = Call(q, bodies, [keys, values], np.full((BATCH, 1), 96, np.int32))
    call.run()
    return call


# a body of each form: groups, a centre in place of zero points, tables with outliers before RoPE,
# exact rows, polar keys, runs of pairs and of channels that a matrix mixes
FORMS = (
    *("3 bits, 64", "3 bits, 128", "before RoPE, tables", "dense fp32", "polar", "runs"),
    "runs of mixed keys",
)


@pytest.mark.parametrize("case", FORMS)
def test_arrays_that_are_cut_short_or_of_another_dtype_are_named(case: str):
    call = call_of(case)
    for name, arrays in zip(("keys", "values"), call.sides, strict=True):
        for i, array in enumerate(arrays):
            other = np.int32 if array.dtype == np.float32 else np.float32
            for change in (array[..., :-1], np.zeros(array.shape, other), array[None]):
                arrays[i] = change
                message = call.refused()
                assert f"of {name} must be" in message, f"array {i} of {name}: {message}"
            arrays[i] = array
    call.run()


@pytest.mark.parametrize("case", FORMS)
def test_arrays_that_are_missing_or_too_many_are_an_error(case: str):
    call = call_of(case)
    call.sides[1].append(call.sides[1][-1])
    assert "too many arrays" in call.refused()
    call.sides[1] = call.sides[1][:-2]
    assert "of values is missing" in call.refused()


# (case, field of the body of keys, a value that does not fit its arrays)
FIELDS = (
    *(("3 bits, 64", "bits", 12), ("3 bits, 64", "width", 24), ("3 bits, 64", "span", 64)),
    *(("3 bits, 64", "slots", 3), ("3 bits, 64", "group", 0), ("3 bits, 64", "heads", 0)),
    *(
        ("3 bits, 64", "chunks", 1 << 40),
        ("dense fp32", "form", "polar"),
        ("polar", "form", "rows"),
    ),
    *(("polar", "angle_bits", 9), ("outliers", "pool", 7), ("dense fp32", "rotated", True)),
    *(("runs", "form", "polar"), ("runs", "span", 8), ("runs", "synthesis", True)),
    *(("3 bits, 64", "synthesis", True), ("runs of mixed keys", "synthesis", False)),
    ("runs", "rotated", False),
    *(("runs", "run_channels", (n, m, *(0,) * 6)) for n, m in ((3, 0), (0, 0), (66, 0), (-2, 66))),
)


@pytest.mark.parametrize(("case", "field", "wrong"), FIELDS)
def test_bodies_that_do_not_fit_their_arrays_are_an_error(case: str, field: str, wrong: Any):
    call = call_of(case)
    call.bodies[0] = dataclasses.replace(call.bodies[0], **{field: wrong})
    message = call.refused()
    assert "kvq_decode_attention: " in message
    assert ("unknown runs" in message) == (field in ("run_channels", "span") and case == "runs")


@pytest.mark.parametrize("case", ["runs", "3 bits, 64"])
def test_a_body_on_the_wrong_side_is_an_error(case: str):
    """Keys in runs are rotated and values are not. Their arrays differ, and fit their bodies."""
    call = call_of(case)
    for side in (0, 1) if case == "runs" else ():
        both = dataclasses.replace(call, bodies=2 * call.bodies[side : side + 1])
        message = dataclasses.replace(both, sides=2 * [call.sides[side]]).refused()
        assert f"of the {('values', 'keys')[side]} has unknown rotation" in message
    call.bodies[1] = dataclasses.replace(call.bodies[1], rotated=True)
    assert "of the values has unknown rotation" in call.refused()


def test_limits_and_capacities_that_do_not_fit_are_an_error():
    call = call_of("3 bits, 64")
    for capacity, message in ((97, "not a whole number"), (192, "words of keys must be")):
        assert message in dataclasses.replace(call, capacity=capacity).refused()
    assert "limits must be [B, T]" in dataclasses.replace(call, limits=call.limits[:2]).refused()


def test_a_message_has_the_names_of_dtypes():
    call = call_of("3 bits, 64")
    call.sides[0][0] = call.sides[0][0].astype(np.int32)
    assert re.search(r"must be S16 \[.*, got S32 \[", call.refused())


@pytest.mark.parametrize("cap", [0, -5.0, np.nan])
def test_a_soft_cap_that_is_not_positive_is_an_error(cap: float):
    arrays: Any = inputs("3 bits, 64", 4, 1, 96)
    q, keys, values, *_ = arrays
    k, v = (side.body for side in CASES["3 bits, 64"])
    limits: Any = np.full((BATCH, 1), 96, np.int32)
    with pytest.raises(ValueError, match="soft_cap must be positive"):
        native.decode_attention(q, (k, keys), (v, values), limits, capacity=96, soft_cap=cap)
