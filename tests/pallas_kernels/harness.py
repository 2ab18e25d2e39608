"""A decode-attention kernel against its reference: one set of checks for every stored format.

A case (`KernelCase`) names a format of keys and one of values. Its sides (`StoredSide`) hold arrays
as a cache stores them, the rows in float64 that they stand for, and rows that a wrong reading would
give. Each check compares a kernel with float64 attention over the rows, and then shows that it
would notice a wrong kernel: every wrong result must be further away than the tolerance.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Reader
from tests.exhaustive import some
from tests.float64 import row_errors, softmax
from tests.pallas_kernels.emulator import Emulated
from tests.pallas_kernels.lowering import lower_for_cuda

HEADS = 2
INTERPRETED = Launch(interpret=True)
EMULATED = Emulated()
FLOATS = (float("nan"), float("inf"), 60000.0)  # 60000 times a code is infinite in fp16

Shape = tuple[int, int, int, int]  # [B, K, S, H]


@dataclasses.dataclass(frozen=True)
class StoredSide:
    """Keys or values as a cache stores them, and what they stand for.

    Args:
        reader: reads the arrays.
        arrays: as a cache stores them.
        rows: the rows that they stand for [B, K, S, H], rotated if keys are stored before RoPE.
        misread: () -> rows that wrong readings of the arrays would give, by what is wrong.
        spoiled: (limits, garbage) -> the arrays, with everything overwritten that no token below a
            row's limit reads.
    """

    reader: Reader
    arrays: Sequence[Any]
    rows: np.ndarray
    misread: Callable[[], Mapping[str, np.ndarray]]
    spoiled: Callable[[Sequence[int], Any], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The rows of a batch, which end around the borders of tiles."""

    capacity: int
    limits: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.limits)


def tuned(splits: int, tile: int = 128, batch: int = 7) -> Tuning:
    """Return a tuning with this number of splits of each row and head."""
    return Tuning(tile=tile, cores=splits * HEADS * batch, resident=1)


# The capacity is not a multiple of the tile, so the last tile moves back.
SHORT = Lengths(320, (0, 1, 127, 128, 129, 257, 320))
LONG = Lengths(1088, (0, 1, 127, 128, 257, 1001, 1088))  # several splits in the default tuning


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """A format of keys and one of values.

    Args:
        id: the name of the case.
        keys: (shape, seed) -> stored keys.
        values: (shape, seed) -> stored values.
        head_dim: H.
        group: query heads per KV head.
        short: lengths for interpreted kernels.
        long: lengths for GPUs, and for lowering.
        tuning: of interpreted kernels. None is the default of the readers.
        tolerance: relative error of an output row.
        margin: the error of a wrong result is more than `margin` times the tolerance.
        garbage: what `spoiled` is called with.
        span: tokens that `spoiled` cannot tell apart.
    """

    id: str
    keys: Callable[[Shape, int], StoredSide]
    values: Callable[[Shape, int], StoredSide]
    head_dim: int
    group: int = 4
    short: Lengths = SHORT
    long: Lengths = LONG
    tuning: Tuning | None = dataclasses.field(default_factory=lambda: tuned(2))
    tolerance: float = 1e-2
    margin: float = 3
    garbage: tuple[Any, ...] = FLOATS
    span: int = 1

    def sides(self, lengths: Lengths) -> tuple[StoredSide, StoredSide]:
        return _sides(self, lengths.batch, lengths.capacity)

    def sizes(self, launch: Launch) -> tuple[Lengths, Tuning | None]:
        """Return lengths and tuning for a launch. On a GPU kernels run in their default tuning, as
        in use.
        """
        return (self.short, self.tuning) if launch.interpret else (self.long, None)

    def queries(self, batch: int) -> jax.Array:
        shape = batch, HEADS, self.group, self.head_dim
        return jnp.asarray(np.random.default_rng(9).standard_normal(shape), jnp.float32)


@functools.lru_cache(maxsize=8)  # all of them would crowd out compiled programs
def _sides(case: KernelCase, batch: int, tokens: int) -> tuple[StoredSide, StoredSide]:
    shape = batch, HEADS, tokens, case.head_dim
    return case.keys(shape, 0), case.values(shape, 1)


def reference(q: Any, k: np.ndarray, v: np.ndarray, limits: Sequence[int]) -> np.ndarray:
    """Return softmax(q k^T / sqrt(H)) v over the first limits[b] tokens, or zeros without any."""
    scores = np.asarray(q, np.float64) @ np.swapaxes(k, 2, 3) * k.shape[-1] ** -0.5
    seen = np.arange(k.shape[2]) < np.asarray(limits)[:, None, None, None]
    return softmax(scores, seen) @ v


@functools.partial(jax.jit, static_argnames=("readers", "capacity", "tuning", "launch"))
def attend(
    readers: tuple[Reader, Reader],
    q: jax.Array,
    k: Sequence[Any],
    v: Sequence[Any],
    limits: jax.Array,
    capacity: int,
    tuning: Tuning | None,
    launch: Launch,
) -> Any:
    keys, values = zip(readers, (k, v), strict=True)
    return decode_attention(
        q, keys, values, limits, capacity=capacity, tuning=tuning, launch=launch
    )


def outputs(
    case: KernelCase,
    arrays: tuple[Sequence[Any], Sequence[Any]],
    lengths: Lengths,
    tuning: Tuning | None,
    launch: Launch,
) -> np.ndarray:
    """Return the kernel's attention to the first limits[b] tokens of these arrays."""
    readers = tuple(side.reader for side in case.sides(lengths))
    limits, q = jnp.asarray(lengths.limits), case.queries(lengths.batch)
    return output(attend(readers, q, *arrays, limits, lengths.capacity, tuning, launch))


def output(part: Any) -> np.ndarray:
    return np.asarray(part.o / jnp.maximum(part.l, 1e-30))


def check_attention(
    case: KernelCase, lengths: Lengths, tuning: Tuning | None, launch: Launch = INTERPRETED
) -> None:
    """Check a kernel against attention over the rows that its arrays stand for."""
    (k, v), limits = case.sides(lengths), lengths.limits
    q, live = case.queries(lengths.batch), np.asarray(limits) > 0
    actual = outputs(case, (k.arrays, v.arrays), lengths, tuning, launch)
    assert (actual[~live] == 0).all(), "a row without tokens has no output"
    errors = row_errors(actual, reference(q, k.rows, v.rows, limits)).max(axis=(1, 2))
    by_row = dict(zip(limits, errors, strict=True))
    assert errors[live].max() < case.tolerance, f"errors by row {by_row}"
    fewer = [max(limit - 1, 0) for limit in limits]
    more = [min(limit + 1, lengths.capacity) for limit in limits]
    wrong = {
        "zeros": np.zeros(actual.shape),
        "the next row": np.roll(actual, 1, axis=0),
        "values in the place of keys": reference(q, v.rows, v.rows, limits),
        "keys in the place of values": reference(q, k.rows, k.rows, limits),
        "one token fewer": reference(q, k.rows, v.rows, fewer),
        "one token more": reference(q, k.rows, v.rows, more),
        "keys of the next head": reference(q, np.roll(k.rows, 1, axis=1), v.rows, limits),
        "keys of the next group": reference(q, np.roll(k.rows, 32, axis=2), v.rows, limits),
        **{
            f"keys {name}": reference(q, rows, v.rows, limits) for name, rows in k.misread().items()
        },
        **{f"values {name}": reference(q, k.rows, r, limits) for name, r in v.misread().items()},
    }
    expected = reference(q, k.rows, v.rows, limits)
    for name, result in wrong.items():
        close = expected if name == "the next row" else actual
        error = row_errors(close, result)[live].max()
        assert error > case.margin * case.tolerance, f"{name} would pass: {error}"


def check_unused_capacity(
    case: KernelCase,
    lengths: Lengths,
    tuning: Tuning | None,
    launch: Launch = INTERPRETED,
    tolerance: float = 0.0,
) -> None:
    """Check that whatever lies at a row's limit and behind it changes no bit (or no more than the
    tolerance).
    """
    sides, limits = case.sides(lengths), np.asarray(lengths.limits)
    clean = tuple(side.arrays for side in sides)
    further = np.minimum(limits + case.span, lengths.capacity)
    shown = -(-limits // case.span) * case.span < further
    longer = dataclasses.replace(lengths, limits=tuple(map(int, further)))
    expected = outputs(case, clean, lengths, tuning, launch)
    expected_further = outputs(case, clean, longer, tuning, launch)[shown]
    assert shown.any(), "no row can show that its next tokens are spoiled"
    for garbage in case.garbage:
        dirty = tuple(side.spoiled(lengths.limits, garbage) for side in sides)
        for before, after in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
            of_tokens = np.ndim(before) > 2 and np.shape(before)[0] == lengths.batch
            changed = (np.asarray(before) != np.asarray(after)).any()
            assert changed or not of_tokens, "an array of tokens was not spoiled"
        actual = outputs(case, dirty, lengths, tuning, launch)
        assert np.isfinite(actual).all(), f"{garbage} leaks"
        if tolerance:
            assert row_errors(actual, expected).max() <= tolerance, f"{garbage} leaks"
        else:
            np.testing.assert_array_equal(actual, expected, err_msg=f"{garbage} leaks")
        other = outputs(case, dirty, longer, tuning, launch)[shown]
        differ = (other != expected_further).any(axis=(1, 2, 3))
        assert differ.all(), "the tokens at the limit are not spoiled: nothing was shown"


def lowered_attention(case: KernelCase, launch: Launch) -> str:
    """Return the StableHLO of attention over the long arrays of a case, in its default tuning."""
    k, v = case.sides(case.long)
    return lower_for_cuda(
        lambda *args: attend((k.reader, v.reader), *args, case.long.capacity, None, launch),
        *(case.queries(case.long.batch), k.arrays, v.arrays, jnp.asarray(case.long.limits)),
    )


def each_lowering(cases: Sequence[Any], usual: Sequence[Any] | None = None) -> pytest.MarkDecorator:
    """Parametrize a test over cases in assembly, and over the first one in array operations too.
    All others run with --exhaustive.
    """
    usual = list(usual or cases)
    both = [(case, arithmetic) for case in cases for arithmetic in ("asm", "jnp")]
    chosen = [(case, "asm") for case in usual] + [(usual[0], "jnp")]
    return pytest.mark.parametrize(
        ("case", "arithmetic"), some(both, chosen), ids=lambda value: getattr(value, "id", None)
    )


def launch_name(value: Any) -> str | None:
    """Name a launch, or a case that has a name, in the id of a test."""
    if not isinstance(value, Launch):
        return getattr(value, "id", None)
    if value.interpret:
        return "emulated" if value.asm else "interpreted"
    return f"gpu-{value.arithmetic if value.route == 'triton' else value.route}"


def launches(
    cases: Iterable[Any],
    usual: Iterable[Any],
    emulated: Iterable[Any] = (),
    on_gpus: Iterable[Any] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test over `case` and `launch`: one check of a kernel, wherever it runs.

    Args:
        cases: all cases.
        usual: of these, the cases that run interpreted. The others do with --exhaustive.
        emulated: the cases that run in assembly, executed in NumPy.
        on_gpus: the cases that run on a GPU, in both arithmetics. All cases by default.
    """
    cases, usual, emulated = list(cases), list(usual), list(emulated)
    here = [(case, INTERPRETED) for case in cases] + [(case, EMULATED) for case in emulated]
    every_run = [(case, INTERPRETED) for case in usual] + [(case, EMULATED) for case in emulated]
    devices = [
        pytest.param(case, Launch(arithmetic), marks=pytest.mark.gpu)
        for case in (cases if on_gpus is None else on_gpus)
        for arithmetic in ("jnp", "asm")
    ]
    return pytest.mark.parametrize(
        ("case", "launch"), [*some(here, every_run), *devices], ids=launch_name
    )


def anywhere(test: Callable[..., Any]) -> Callable[..., Any]:
    """Parametrize a test over `launch`: interpreted, and on a GPU."""
    gpu = pytest.mark.gpu
    devices = [pytest.param(Launch(arithmetic), marks=gpu) for arithmetic in ("jnp", "asm")]
    return pytest.mark.parametrize("launch", [INTERPRETED, *devices], ids=launch_name)(test)


def and_on_a_gpu(interpreted: Launch) -> pytest.MarkDecorator:
    """Parametrize a test over `launch`: this one, and Mosaic GPU on a GPU."""
    on_device = pytest.param(Launch(route="mosaic"), marks=pytest.mark.gpu)
    return pytest.mark.parametrize("launch", [interpreted, on_device], ids=launch_name)


def on_a_gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test on a GPU, for both values of its argument `arithmetic`."""
    marks = (
        pytest.mark.gpu,
        pytest.mark.usefixtures("gpu"),
        pytest.mark.parametrize("arithmetic", ["jnp", "asm"]),
    )
    for mark in marks:
        test = mark(test)
    return test
