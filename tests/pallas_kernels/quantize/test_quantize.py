"""The quantize-and-pack kernel, interpreted, against kvq_jax.arrays.grouped_array.quantize, and its
rounding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import grouped_array, uniform
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat, Scheme
from pallas_kernels.launch import Launch
from pallas_kernels.quantize.kernel import PackedRows, quantize_rows
from pallas_kernels.quantize.rounding import Job, Quantizer
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import PlaneLayout
from tests.pallas_kernels.grouped_sides import format_of
from tests.pallas_kernels.harness import INTERPRETED, each_lowering, launches
from tests.pallas_kernels.lowering import lower_for_cuda

TOKENS, HEADS = 128, 2


@dataclasses.dataclass(frozen=True)
class QuantizeCase:
    """rows_scheme: the scheme of the rows. The format may be hybrid even if they are symmetric."""

    format: GroupFormat
    dtype: str
    divided: bool = False
    rows_scheme: Scheme | None = None

    @property
    def scheme(self) -> Scheme:
        return self.rows_scheme or self.format.scheme

    @property
    def id(self) -> str:
        f = self.format
        rows = f"_of_{self.rows_scheme}" if self.rows_scheme else ""
        format = f"{f.scheme}{f.bits}{rows}_{f.axis}{f.group_size}_h{f.channels}"
        return f"{format}_{self.dtype}_{f.scale_dtype}{'_divided' * self.divided}"


# Every two of scheme, axis, head dim and dtype meet, and every code width meets each axis.
CASES = (
    QuantizeCase(format_of(2, "hybrid", "channels", 128), "bfloat16", divided=True),
    QuantizeCase(format_of(4, "hybrid", "channels", 256), "float16"),
    QuantizeCase(format_of(2, "sym", "channels", 64), "float32"),
    QuantizeCase(format_of(3, "sym", "channels", 256, 64), "bfloat16"),
    QuantizeCase(format_of(2, "asym", "channels", 64), "float16", divided=True),
    QuantizeCase(format_of(8, "asym", "channels", 128), "float32"),
    QuantizeCase(format_of(2, "hybrid", "tokens", 128), "float32"),
    QuantizeCase(format_of(2, "hybrid", "tokens", 64), "bfloat16", rows_scheme="sym"),
    QuantizeCase(format_of(4, "sym", "tokens", 128, scale_dtype="bfloat16"), "float16"),
    QuantizeCase(format_of(3, "hybrid", "tokens", 64), "float16"),
    QuantizeCase(format_of(2, "asym", "tokens", 256), "bfloat16"),
    QuantizeCase(format_of(3, "asym", "tokens", 128, 64, "float32"), "float32"),
    QuantizeCase(format_of(8, "asym", "tokens", 64), "bfloat16", divided=True),
)


def reader_of(format: GroupFormat) -> GroupedReader:
    return GroupedReader(
        format.layout,
        format.axis,
        format.group_size,
        None if format.stores_zero else format.centre,
        format.scale_dtype,
    )


def ordinary_rows(case: QuantizeCase, batch: int = 2, tokens: int = TOKENS) -> jax.Array:
    actual = (
        np.random.default_rng(0)
        .standard_normal((batch, HEADS, tokens, case.format.channels))
        .astype(np.float32)
    )
    skewed = actual[:, :, ::3] if case.format.axis == "channels" else actual[..., ::3]
    skewed += 4  # whole groups, which hybrid stores as asymmetric ones
    return jnp.asarray(actual, case.dtype)


def special_rows(case: QuantizeCase, tied: bool = True) -> jax.Array:
    """Return [2, HEADS, ...]: row 0 of the batch is ordinary, and row 1 has every kind of group
    that needs care. tied: also one whose two modes have the same error but for rounding, which a
    device rounds in its own way.
    """
    actual = np.array(ordinary_rows(case).astype(jnp.float32))
    special, size = actual[1], case.format.group_size
    if case.format.axis == "tokens":
        special = special.swapaxes(1, 2)  # a view: groups run over the last axis
    groups = special[:, :20, :size]
    groups[:, 0] = 0
    groups[:, 1] = 0.3
    groups[:, 2] = -70
    groups[:, 3, 5] = 900
    groups[:, 4, 5], groups[:, 4, 6] = np.inf, -np.inf
    groups[:, 5, :3] = np.nan
    groups[:, 6, ::2], groups[:, 6, 1] = np.nan, np.inf
    groups[:, 7] = np.nan
    groups[:, 8] = -np.inf
    groups[:, 9] = np.abs(groups[:, 9]) + 1
    groups[:, 9, 0] = np.nan  # its level nearest zero is the lowest, not zero
    groups[:, 10, 0], groups[:, 10, 1] = 60000, -40000  # beyond the range of fp16 scales
    groups[:, 11] = groups[:, 11] * 1e-7
    groups[:, 12] = 1000 + groups[:, 12] / 64  # the stored zero is coarser than a step
    groups[:, 13] = 0
    groups[:, 13, -1] = -1
    groups[:, 14] = np.arange(size) - size // 2
    if tied:
        groups[:, 15] = np.where(np.arange(size) % 2, 0.5, -0.5)
    return jnp.asarray(actual, case.dtype)


def divisor_of(case: QuantizeCase, batch: int = 2) -> jax.Array | None:
    if not case.divided:
        return None
    return jnp.asarray(
        np.random.default_rng(1).uniform(0.2, 3, (batch, HEADS, 1, case.format.channels)),
        jnp.float32,
    )


@functools.partial(jax.jit, static_argnames=("case", "launch"))
def fused(
    case: QuantizeCase, rows: jax.Array, divisor: jax.Array | None, launch: Launch
) -> PackedRows:
    return quantize_rows(
        rows, reader_of(case.format), case.scheme, case.format.bits, divisor=divisor, launch=launch
    )


@functools.partial(jax.jit, static_argnames="case")
def reference(case: QuantizeCase, rows: jax.Array, divisor: jax.Array | None) -> GroupedArray:
    scaled = rows if divisor is None else rows.astype(jnp.float32) / divisor
    return grouped_array.quantize(scaled, case.format, case.scheme)


def ulps(actual: jax.Array, expected: jax.Array) -> np.ndarray:
    """Return the distance in units of the last place, counted through the bits."""

    def ordered(x: jax.Array) -> np.ndarray:
        bits = (
            np.asarray(x).view(np.uint16 if x.dtype.itemsize == 2 else np.uint32).astype(np.int64)
        )
        sign = 1 << (8 * x.dtype.itemsize - 1)
        return np.where(bits & sign, sign - bits, bits)

    return np.abs(ordered(actual) - ordered(expected))


def codes_of(packed: PackedRows, like: GroupedArray) -> np.ndarray:
    return np.asarray(grouped_array.codes(dataclasses.replace(like, words=packed.words)), np.int64)


def expected_codes(
    case: QuantizeCase, rows: jax.Array, divisor: jax.Array | None, expected: GroupedArray
) -> np.ndarray:
    """Return the codes of the reference, but with ties rounded half to even.

    XLA replaces its division by a product with a reciprocal, which misses some ties (2.5e-4 of all
    codes in one of these cases).
    """
    codes = np.asarray(grouped_array.codes(expected), np.int64)
    f, x = (
        case.format,
        np.asarray(rows.astype(jnp.float32), np.float64)
        / (1 if divisor is None else np.asarray(divisor, np.float64)),
    )
    scale, zero = (
        np.asarray(grouped_array.per_element(s, f), np.float64)
        for s in (expected.scale, grouped_array.zeros(expected))
    )
    with np.errstate(all="ignore"):
        stored = (-f.centre * scale).astype(jnp.dtype(f.scale_dtype))
        symmetric = {"sym": np.True_, "asym": np.False_, "hybrid": zero == stored}[case.scheme]
        q = (x - np.where(symmetric, -f.centre * scale, zero)) / scale
    fine = 2.0 ** (21 - f.code_bits)
    plain = (
        np.isfinite(q)
        & (scale > 0)
        & (np.abs(x) < uniform.saturation_limit(jnp.dtype(f.scale_dtype)))
    )
    q = np.round(np.where(plain, q, 0) * fine) / fine
    top = np.where(symmetric, 2 * f.centre, f.centre)
    return np.where(q - np.floor(q) == 0.5, np.round(q).clip(0, top), codes).astype(np.int64)


def disagreement(
    case: QuantizeCase,
    actual: PackedRows,
    expected: GroupedArray,
    codes: np.ndarray,
    share: float = 1e-4,
) -> str | None:
    """Return what is wrong, if anything. At most `share` of the codes may differ, by one."""
    assert actual.scale.dtype == jnp.dtype(case.format.scale_dtype)
    assert [w.shape for w in actual.words] == [w.shape for w in expected.words]
    if (actual.zero is None) != (expected.zero is None):
        return "one stores zeros, the other does not"
    for name, one, other in (
        ("scale", actual.scale, expected.scale),
        ("zero", actual.zero, expected.zero),
    ):
        if one is None or other is None:
            continue
        assert one.shape == other.shape, name
        # fp32 scales are not rounded, so they show how a quotient was computed.
        allowed = 1 if one.dtype.itemsize == 2 else 4
        if (far := ulps(one, other) > allowed).any():
            return (
                f"{name} is {int(ulps(one, other).max())} ulp off, first at {np.argwhere(far)[0]}"
            )
    off = np.abs(codes_of(actual, expected) - codes)
    if off.max() > 1:
        return f"a code is {off.max()} off, first at {np.argwhere(off > 1)[0]}"
    return (
        f"{(off > 0).mean():.1e} of the codes differ, first at {np.argwhere(off)[0]}"
        if (off > 0).mean() > share
        else None
    )


@launches(CASES, CASES[::3], (CASES[0], CASES[11]))
def test_codes_scales_and_zeros_are_those_of_quantize(case, launch):
    inputs = [(special_rows(case, tied=launch.interpret), divisor_of(case))]
    if not launch.interpret:
        inputs.append((ordinary_rows(case, 4, 4096), divisor_of(case, 4)))
    for rows, divisor in inputs:
        actual, expected = fused(case, rows, divisor, launch), reference(case, rows, divisor)
        codes = expected_codes(case, rows, divisor, expected)
        assert (wrong := disagreement(case, actual, expected, codes)) is None, wrong
        stored = {name: getattr(actual, name) for name in ("words", "scale", "zero")}
        body = dataclasses.replace(expected, **stored)
        assert np.isfinite(np.asarray(grouped_array.dequantize(body))).all()


@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: case.id)
def test_the_comparison_notices_what_is_wrong(case):
    rows, divisor = ordinary_rows(case), divisor_of(case)
    expected = reference(case, rows, divisor)
    codes = expected_codes(case, rows, divisor, expected)
    right = fused(case, rows, divisor, INTERPRETED)
    assert disagreement(case, right, expected, codes) is None
    axis, size = (3 if case.format.axis == "channels" else 2), case.format.group_size
    shifted_rows = fused(case, jnp.roll(rows, size, axis), divisor, INTERPRETED)
    assert disagreement(case, shifted_rows, expected, codes, 0.1), "rows shifted by one group"
    groups = 2
    wrong = {
        "scales shifted by one group": right._replace(scale=jnp.roll(right.scale, 1, groups)),
        "zeros shifted by one group": right._replace(zero=jnp.roll(right.zero, 1, groups)),
        "words shifted by one row": right._replace(
            words=tuple(jnp.roll(w, 1, 2) for w in right.words)
        ),
        "the last plane set empty": right._replace(
            words=(*right.words[:-1], right.words[-1] * np.int16(0))
        ),
    }
    for name, packed in wrong.items():
        assert disagreement(case, packed, expected, codes, 0.1), name


@pytest.mark.parametrize("code_bits", [2, 3, 4, 5, 8])
def test_ties_round_to_even_though_the_reciprocal_is_approximate(code_bits):
    """A GPU's quotients are up to 2 ulp off. A tie must still come out as one, and other quotients
    must not change.
    """
    top = 2**code_bits - 1
    rng = np.random.default_rng(code_bits)
    scale = rng.uniform(0.001, 10, (4000, 1)).astype(np.float16).astype(np.float32)
    level = rng.integers(0, 2 * top + 1, (4000, 32)) / 2
    near = rng.uniform(-0.45, 0.45, level.shape) * (rng.random(level.shape) < 0.5)
    x = np.where(near == 0, level * scale, (np.floor(level) + near) * scale).astype(np.float32)
    expected = np.where(near == 0, np.round(level), np.floor(level)).clip(
        0, top
    )  # np.round is half to even
    reader = GroupedReader(PlaneLayout(code_bits, 128, 4, 32, 1), "channels", 32, None)
    job = Job(reader, "asym", code_bits, divided=False, spans=1, asm=False)
    missed = 0
    for ulp in (-2, -1, 0, 1, 2):
        inverse = (1 / scale.astype(np.float64) * (1 + ulp * 2.0**-24)).astype(np.float32)
        actual = jax.jit(job.levels)(
            x,
            Quantizer(
                scale, np.zeros_like(scale), np.zeros_like(scale), inverse, job.near, float(top)
            ),
        )
        assert (np.asarray(actual) - 1.5 * 2**23 == expected).all(), f"{ulp=}"
        missed += (np.round((x * inverse).clip(0, top)) != expected).sum()
    assert missed > 100, "the plain product would have done: the inputs are too easy"


@each_lowering(CASES, CASES[::3])
def test_every_case_lowers_for_cuda(case, arithmetic):
    text = lower_for_cuda(
        lambda *args: fused(case, *args, Launch(arithmetic)),
        *(ordinary_rows(case, 1), divisor_of(case, 1)),
    )
    assert "triton" in text
    assert f"quantize_{case.scheme}_{case.format.axis}" in text, "the kernel has lost its name"


READER = reader_of(format_of(2, "hybrid", "channels", 64))


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("change", "rows", "scheme", "bits", "named"),
    [
        ({}, (1, 1, 48, 64), "hybrid", 2, "48 tokens"),
        ({}, (1, 1, 0, 64), "hybrid", 2, "0 tokens"),
        ({}, (1, 1, 32, 128), "hybrid", 2, "128 channels"),
        ({}, (1, 1, 32, 64), "hybrid", 3, "3 bits"),
        ({}, (1, 1, 32, 64), "nearest", 2, "choose 'asym'"),
        ({"centre": 3}, (1, 1, 32, 64), "hybrid", 2, "without zero points"),
        ({"centre": 3}, (1, 1, 32, 64), "sym", 1, "bits=2"),
        ({"group": 8}, (1, 1, 32, 64), "hybrid", 2, "multiple of 16"),
        ({"axis": "tokens", "group": 64}, (1, 1, 96, 64), "hybrid", 2, "divide 96"),
        ({"layout": PlaneLayout(9, 64, 4, 16, 4)}, (1, 1, 32, 64), "hybrid", 8, "9 bits"),
        ({"layout": PlaneLayout(3, 80, 8, 16, 2)}, (1, 1, 32, 80), "hybrid", 2, "XLA path"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_with_the_reason(change, rows, scheme, bits, named):
    with pytest.raises(ValueError, match=named):
        quantize_rows(jnp.zeros(rows), dataclasses.replace(READER, **change), scheme, bits)
