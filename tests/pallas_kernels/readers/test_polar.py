"""Keys in polar form: the kernel, interpreted, against attention over the rows that the same codes
stand for; its lowering for CUDA; and its cosines against NumPy's."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import polar_array
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.arrays.packing import pack, unpack
from kvq_jax.arrays.polar_array import PolarFormat
from kvq_jax.arrays.stored import load_body
from kvq_jax.codecs.kernel_readers import polar as polar_reader
from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import Tuning, tuning_for
from pallas_kernels.launch import Launch
from pallas_kernels.readers.polar import PolarReader, polynomial_cos_sin
from tests.exhaustive import some
from tests.pallas_kernels.decode_attention.test_decode import GARBAGE, output, reference
from tests.pallas_kernels.kernel_cases import (
    Lengths,
    format_of,
    reader_of,
    row_errors,
    spoiled,
    stored_rows,
)
from tests.pallas_kernels.lowering import lower_for_cuda

HEADS, CAPACITY, ROWS = 2, 384, 7
TOLERANCE = 3e-3
INTERPRETED = Launch(interpret=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """Keys of this format with the values of another; a value format of None is rows in
    bfloat16."""

    id: str
    k: PolarFormat
    v: GroupFormat | None
    group: int  # query heads of a KV head

    @property
    def head_dim(self) -> int:
        return self.k.channels

    @property
    def reader(self) -> PolarReader:
        found = polar_reader(
            self.k.layout, self.k.angle_bits, self.k.group_size, "float16", grouped_angles=True
        )
        assert isinstance(found, PolarReader), found
        return dataclasses.replace(found, scale_dtype=self.k.scale_dtype)

    @property
    def usual(self) -> Tuning:
        return tuning_for(self.reader, reader_of(self.v, self.head_dim), 8, CAPACITY, False)


def case(
    angle: int,
    radius: int,
    size: int,
    head_dim: int,
    group: int,
    v: GroupFormat | None,
    dtype: str = "float16",
) -> Case:
    format = PolarFormat(angle, radius, head_dim, size, size, scale_dtype=dtype)
    return Case(f"m{angle}n{radius}_size{size}_h{head_dim}_g{group}", format, v, group)


CASES = (
    case(4, 4, 128, 128, 4, None),
    case(4, 2, 64, 64, 7, format_of(4, "asym", "channels", 64)),
    case(4, 4, 32, 256, 8, None, "bfloat16"),
    case(4, 2, 128, 128, 1, format_of(2, "asym", "tokens", 128, 128), "float32"),
)
DEFAULT = CASES[0]
each = pytest.mark.parametrize("case", some(CASES, CASES[:2]), ids=lambda case: case.id)


def lengths(tile: int) -> Lengths:
    """In one batch: no token, one, those around a tile, all, and one length that two splits share
    unevenly."""
    return Lengths(
        CAPACITY, (0, 1, tile - 1, tile, tile + 1, min(5 * tile // 2 + 1, CAPACITY - 32), CAPACITY)
    )


def tuned(tile: int, splits: int) -> Tuning:
    return Tuning(tile=tile, cores=splits * HEADS * ROWS, resident=1)


@functools.cache
def rows(head_dim: int, seed: int) -> np.ndarray:
    """Pairs that turn around a direction of their own, some around the whole circle; some channels
    are large, and some groups of tokens."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((ROWS, HEADS, CAPACITY, head_dim)) + 2 * rng.standard_normal(
        (1, HEADS, 1, head_dim)
    )
    found[..., :: head_dim // 4] *= 3
    return (
        found * np.repeat(rng.uniform(0.2, 1.2, (ROWS, HEADS, CAPACITY // 32, 1)), 32, axis=2)
    ).astype(np.float32)


def stored_keys(
    format: PolarFormat, keys: np.ndarray, *, moved: int = 0
) -> tuple[list[jax.Array], np.ndarray]:
    """Return (stored arrays, the rows that they stand for). moved: the rows are those of the steps
    of radii so many groups further."""
    leaves = polar_array.specs(format, 1, 1, format.block)
    body = jax.tree.map(
        lambda leaf, array: leaf.store(array),
        leaves,
        polar_array.quantize(jnp.asarray(keys), format),
    )
    meant = load_body(leaves, body)
    assert meant.radius_scale is not None
    other = dataclasses.replace(meant, radius_scale=jnp.roll(meant.radius_scale, moved, axis=2))
    return jax.tree.leaves(body), np.asarray(polar_array.dequantize(other))


def spoiled_keys(
    format: PolarFormat, arrays: list[jax.Array], limits: tuple[int, ...], garbage: float
) -> list[jax.Array]:
    """Return the stored arrays with all that no token below a row's limit reads overwritten: codes
    by ones, floats by `garbage`."""
    sets = len(format.layout.sets)
    codes = np.array(unpack(tuple(arrays[:sets]), format.layout))
    scales = [np.array(array) for array in arrays[sets:]]
    value = np.asarray(jnp.asarray(garbage, format.scale_dtype))
    for b, limit in enumerate(limits):
        codes[b, :, limit:] = (1 << format.layout.bits) - 1
        for array in scales:  # a group is in use as long as one of its tokens is
            array[b, :, -(-limit // format.group_size) :] = (
                value.view(np.uint16) if array.dtype == np.uint16 else value
            )
    return [*pack(jnp.asarray(codes), format.layout), *map(jnp.asarray, scales)]


def queries(case: Case) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(9).standard_normal((ROWS, HEADS, case.group, case.head_dim)),
        jnp.float32,
    )


@functools.partial(jax.jit, static_argnames=("case", "tuning", "launch"))
def attend(case: Case, q, k, v, limits, tuning: Tuning | None, launch: Launch):
    return decode_attention(
        q,
        (case.reader, k),
        (reader_of(case.v, case.head_dim), v),
        limits,
        capacity=CAPACITY,
        tuning=tuning,
        launch=launch,
    )


def check_lengths(case: Case, tuning: Tuning | None, launch: Launch) -> None:
    q, limits = queries(case), lengths((tuning or case.usual).tile).limits
    keys, values = rows(case.head_dim, 0), rows(case.head_dim, 1)
    (k, k_rows), (v, v_rows) = stored_keys(case.k, keys), stored_rows(case.v, values)
    found = output(attend(case, q, k, v, jnp.asarray(limits), tuning, launch))
    errors = row_errors(found, reference(q, k_rows, v_rows, limits)).max(axis=(1, 2))
    assert (found[0] == 0).all(), "a row without tokens has no output"
    assert errors[1:].max() < TOLERANCE, f"errors by row {dict(zip(limits, errors, strict=True))}"
    halves = np.split(k_rows, 2, axis=-1)
    for name, wrong in {
        "zeros": np.zeros(found.shape),
        "values in the place of keys": reference(q, v_rows, v_rows, limits),
        "keys in the place of values": reference(q, k_rows, k_rows, limits),
        "one token fewer": reference(q, k_rows, v_rows, tuple(max(n - 1, 0) for n in limits)),
        "one token more": reference(q, k_rows, v_rows, tuple(min(n + 1, CAPACITY) for n in limits)),
        "the steps of the next group": reference(
            q, stored_keys(case.k, keys, moved=1)[1], v_rows, limits
        ),
        "sines in the place of cosines": reference(
            q, np.concatenate(halves[::-1], axis=-1), v_rows, limits
        ),
    }.items():
        assert row_errors(found, wrong)[1:].max() > 10 * TOLERANCE, f"{name} would pass"


def check_garbage(case: Case, tuning: Tuning | None, launch: Launch, garbage: float) -> None:
    """Check that what lies at a row's limit and behind it changes no bit, whatever it is."""
    q, limits = queries(case), lengths((tuning or case.usual).tile).limits
    clean = [
        stored_keys(case.k, rows(case.head_dim, 0))[0],
        stored_rows(case.v, rows(case.head_dim, 1))[0],
    ]
    dirty = [
        spoiled_keys(case.k, clean[0], limits, garbage),
        spoiled(case.v, clean[1], limits, garbage),
    ]
    for before, after in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert (np.asarray(before) != np.asarray(after)).any(), "an array was not spoiled"
    for more, same in ((0, True), (1, False)):
        ends = jnp.minimum(jnp.asarray(limits) + more, CAPACITY)
        found, wanted = (
            output(attend(case, q, *arrays, ends, tuning, launch))[:-1] for arrays in (dirty, clean)
        )
        differ = (found != wanted).any(axis=(1, 2, 3))
        assert (not differ.any()) if same else differ.all(), (
            f"{more} tokens more than the limits: {differ=}"
        )


@each
def test_every_length_equals_the_reference_on_the_same_codes(case):
    check_lengths(case, tuned(case.usual.tile, 2), INTERPRETED)


@pytest.mark.parametrize("tile", [64, 256])
def test_a_tile_may_be_a_part_of_a_group_or_hold_some(tile):
    check_lengths(DEFAULT, tuned(tile, 2), INTERPRETED)


@each
def test_garbage_in_unused_capacity_does_not_leak(case):
    for garbage in GARBAGE:
        check_garbage(case, tuned(case.usual.tile, 2), INTERPRETED, garbage)


def test_splits_change_nothing_but_rounding():
    limits = jnp.asarray(lengths(32).limits)
    k, v = stored_keys(DEFAULT.k, rows(128, 0))[0], stored_rows(DEFAULT.v, rows(128, 1))[0]
    one, many = (
        output(attend(DEFAULT, queries(DEFAULT), k, v, limits, tuned(32, n), INTERPRETED))
        for n in (1, 5)
    )
    assert row_errors(many, one)[1:].max() < 2e-3
    assert row_errors(many[1:], one[:-1])[1:].max() > 3e-2, "rows of other lengths must differ"


def test_scores_by_themselves_equal_the_reference():
    q, (k, k_rows) = queries(DEFAULT), stored_keys(DEFAULT.k, rows(128, 0))
    found = jax.jit(
        lambda q, k: matvec.scores(
            q, DEFAULT.reader, k, capacity=CAPACITY, tuning=tuned(64, 2), launch=INTERPRETED
        )
    )(q, k)
    assert row_errors(found, np.einsum("bkgh,bksh->bkgs", q, k_rows)).max() < 2e-3
    for moved in (np.roll(k_rows, 1, axis=2), stored_keys(DEFAULT.k, rows(128, 0), moved=1)[1]):
        assert row_errors(found, np.einsum("bkgh,bksh->bkgs", q, moved)).min() > 2e-2, (
            "moved keys, or steps, would pass"
        )


def test_values_in_polar_form_and_other_numbers_of_arrays_are_refused():
    k, _ = stored_keys(DEFAULT.k, rows(128, 0))
    with pytest.raises(NotImplementedError, match="polar codes hold keys"):
        matvec.weighted_values(
            jnp.ones((ROWS, HEADS, 1, CAPACITY)),
            DEFAULT.reader,
            k,
            tuning=tuned(32, 1),
            launch=INTERPRETED,
        )
    with pytest.raises(ValueError, match=r"are 5 arrays"):
        matvec.scores(
            queries(DEFAULT),
            DEFAULT.reader,
            k[:3],
            capacity=CAPACITY,
            tuning=tuned(32, 1),
            launch=INTERPRETED,
        )


@pytest.mark.parametrize("bias", [0, 1024])
def test_polynomials_are_cosines_and_sines_of_any_angle_of_a_group(bias):
    """As a kernel calls them: with the bias of a code in the least angle."""
    code, step = np.meshgrid(np.arange(16) + 0.5, np.linspace(0, 2 * np.pi / 16, 50))
    code, step = (np.tile(x, (33, 1)) for x in (code, step))
    theta = code * step + np.repeat(np.linspace(-np.pi, np.pi, 33), 50)[:, None]
    start = np.float32(theta - (code + bias) * step)
    found = polynomial_cos_sin(*(jnp.asarray(x, jnp.float32) for x in (code + bias, step, start)))
    errors = [
        np.abs(np.asarray(x) - f(theta)).max() for x, f in zip(found, (np.cos, np.sin), strict=True)
    ]
    assert max(errors) < (1e-4 if bias else 4.2e-5)
    assert np.abs(np.asarray(found[0]) - np.sin(theta)).max() > 1, "sines would pass as cosines"


def structs(case: Case):
    k, v = (
        stored_keys(case.k, rows(case.head_dim, 0))[0],
        stored_rows(case.v, rows(case.head_dim, 1))[0],
    )
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
        (queries(case), k, v, jnp.zeros((ROWS,), jnp.int32)),
    )


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_kernel_lowers_for_cuda(case, arithmetic):
    text = lower_for_cuda(
        lambda *args: attend(case, *args, None, Launch(arithmetic)), *structs(case)
    )
    assert "decode_attention" in text
    assert ("cos.approx" in text) == (arithmetic == "asm")


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_kernel_runs_on_a_gpu(case, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check_lengths(case, None, Launch(arithmetic))
    check_lengths(case, tuned(128, 2), Launch(arithmetic))
    for garbage in GARBAGE:
        check_garbage(case, None, Launch(arithmetic), garbage)
