"""The appending kernel quantizes blocks of polar keys, of tables and of outliers as their codecs
do, in their place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.codec import Codec
from kvq_jax.codecs.kernel_writers import KernelWriter
from kvq_jax.layer.plan import by_side
from kvq_jax.types.array_types import ArraySpec, Tree
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from pallas_kernels.quantize.append import Blocks, Places, Side, append_token
from pallas_kernels.quantize.outlier_slots import Slots
from pallas_kernels.quantize.table import TableBlocks
from tests.exhaustive import some
from tests.kvq_jax.layer_runs import parameters_of
from tests.kvq_jax.origins import GENERATED
from tests.pallas_kernels.harness import INTERPRETED, each_lowering, on_a_gpu
from tests.pallas_kernels.lowering import lower_for_cuda, needs_mosaic
from tests.pallas_kernels.quantize.placement import misplaced_rows

HEADS, BODY = 2, 3  # blocks
LEAVING = np.array([True, False, True])


@dataclasses.dataclass(frozen=True)
class WriterCase:
    spec: str
    side: int
    head_dim: int = 64

    @property
    def id(self) -> str:
        return f"{self.spec} {'kv'[self.side]} {self.head_dim}"

    @functools.cached_property
    def layer(self) -> tuple[Codec, Tree, int]:
        """Return the codec, its parameters and the tokens of a block."""
        dims = CacheDims(
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            head_dim=self.head_dim,
            hidden_size=4 * self.head_dim,
        )
        plan = kvq.cache.layout(self.spec, dims, 1, 8 * 128, "bfloat16").plans[0]
        return plan.codecs[self.side], by_side(parameters_of(plan))[self.side], plan.regions.block

    @property
    def writer(self) -> KernelWriter:
        codec, params, _ = self.layer
        writer = codec.kernels.writer(params, (), False)
        assert isinstance(writer, KernelWriter), "no kernel writes this format"
        return writer


CASES = (
    WriterCase("polarquant:group_size=32", 0),
    WriterCase("polarquant:radius_bits=2,group_size=64", 0, 128),
    WriterCase("polarquant:cut=fixed", 0, 128),
    WriterCase("nf4", 0),
    WriterCase("nf4:group_size=128", 1, 256),
    WriterCase("kvquant:bits=3,outliers=0", 0),
    WriterCase("kvquant:bits=4", 0),
    WriterCase("kvquant:bits=4", 1),
    WriterCase("kvquant:bits=3,slots=0.5", 0, 128),
    WriterCase("kvquant:bits=2,outliers=0.05,block=64", 1),
    WriterCase("kvquant:bits=2,thresholds=matrix,slots=0.5", 1),
)
ON_MOSAIC = CASES[1], CASES[4], CASES[6], CASES[7]
USUAL = CASES[0], CASES[3], CASES[6], CASES[7], CASES[10]


def rows_of(case: WriterCase, blocks: int) -> jax.Array:
    """Return rows with far entries and all kinds that need care. The second sequence has coarse
    rows, so that many entries are equal.
    """
    _, _, block = case.layer
    actual = (
        np.random.default_rng(0)
        .standard_t(4, size=(len(LEAVING), HEADS, blocks * block, case.head_dim))
        .astype(np.float32)
    )
    actual[1:] = np.round(actual[1:] * 4) / 4
    for start in range(0, blocks * block, block):
        actual[0, 0, start + 3] = 0
        actual[0, 1, start + 5, 4] = np.nan
        actual[2, 0, start + 2] = np.inf
        actual[2, 1, start + 7, 5] = -np.inf
        actual[2, 1, start + 8] = 2
        actual[2, 0, start + 9] = np.nan
        actual[2, 0, start + 10, :2] = 60000, -40000
    return jnp.asarray(actual)


@functools.partial(jax.jit, static_argnames=("case", "launch"))
def append(
    case: WriterCase,
    body: list[jax.Array],
    ring: jax.Array,
    row: jax.Array,
    places: Places,
    launch: Launch,
) -> list[jax.Array]:
    changed = Side(row, ring[:, :, :0], ring, Blocks(body, *case.writer))
    [side], _ = append_token([changed], places, block=case.layer[2], launch=launch)
    assert isinstance(side.blocks, Blocks)
    return list(side.blocks.body)


@functools.partial(jax.jit, static_argnames=("case",))
def quantized(case: WriterCase, rows: jax.Array) -> list[jax.Array]:
    codec, params, _ = case.layer
    return jax.tree.leaves(codec.quantize(params, (), rows, GENERATED))


def specs_of(case: WriterCase) -> list[ArraySpec]:
    codec, _, block = case.layer
    return jax.tree.leaves(codec.body(len(LEAVING), HEADS, block))


def wrong_in(
    case: WriterCase,
    before: list[jax.Array],
    after: list[jax.Array],
    rows: jax.Array,
    place: np.ndarray,
) -> list[str]:
    """Name every wrong array and row. Expected are `rows`, quantized, from token place[b] on if row
    b leaves.
    """
    blocks, wrong = place // case.layer[2], []
    arrays = zip(before, after, quantized(case, rows), specs_of(case), strict=True)
    for i, (old, written, new, spec) in enumerate(arrays):
        axis = spec.axis("tokens")
        rows_of_array = misplaced_rows(old, written, new, blocks * new.shape[axis], LEAVING, axis)
        wrong += [f"array {i} of row {b}" for b in rows_of_array]
    return wrong


def run(
    case: WriterCase, slots: int, first: np.ndarray, launch: Launch
) -> tuple[list[jax.Array], list[jax.Array], jax.Array, np.ndarray]:
    """Return the body before and after, the rows that leave and their places.

    The block from token first[b] of the sequence on leaves a ring of `slots` slots. If the ring is
    no longer than a block, its last token is the new one, and the ring holds NaN in its place.
    """
    _, _, block = case.layer
    rows, place = rows_of(case, 1), np.array([2, 0, 1]) * block
    body = quantized(case, jnp.tile(rows[::-1] + 1, (1, 1, BODY, 1)))
    ring, index = (
        jnp.full((*rows.shape[:2], slots, rows.shape[3]), 7.0),
        first[:, None] + np.arange(block),
    )
    last_is_new = slots == block
    for b in range(len(first)):
        ring = ring.at[b, :, index[b] % slots].set(jnp.moveaxis(rows[b], 1, 0))
        if last_is_new:
            ring = ring.at[b, :, index[b, -1] % slots].set(jnp.nan)
    new = jnp.full(len(first), last_is_new)
    places = Places(
        jnp.asarray(index[:, -1]), new, jnp.asarray(first), jnp.asarray(place), jnp.asarray(LEAVING)
    )
    return body, append(case, body, ring, rows[:, :, -1:], places, launch), rows, place


def check(case: WriterCase, launch: Launch, halves: int = 3) -> None:
    """Check blocks of a ring of so many halves of a block, and of one that is a block."""
    _, _, block = case.layer
    begin, inside = np.array([block, 0, 2 * block]), np.array([3, 2, 0]) * (block // 2)
    for name, slots, first in (
        ("wrapped", halves * block // 2, inside if halves % 2 else begin),
        ("with the new token", block, begin),
    ):
        before, after, rows, place = run(case, slots, first, launch)
        assert not (wrong := wrong_in(case, before, after, rows, place)), f"{name}: {wrong}"
        assert wrong_in(case, before, after, rows, place[::-1]), f"{name}: another place would pass"
        assert wrong_in(case, before, after, rows.at[:, :, -1].set(7.0), place), (
            f"{name}: without its last token it would pass"
        )
        assert wrong_in(case, before, after, rows[:, ::-1], place), (
            f"{name}: the heads could be exchanged"
        )


@pytest.mark.parametrize("case", some(CASES, USUAL), ids=lambda case: case.id)
def test_a_block_is_that_of_its_codec_and_nothing_else_changes(case):
    check(case, INTERPRETED)


@needs_mosaic
@pytest.mark.parametrize("case", some(CASES, ON_MOSAIC), ids=lambda case: case.id)
def test_blocks_on_mosaic_gpu_are_those_of_their_codec(case):
    blocks = case.writer.blocks
    if blocks.unit == 64 and case.spec.startswith("kvquant"):
        assert "64 tokens share slots" in str(route.unwritten(blocks))
        return
    assert route.unwritten(blocks) is None, "Triton would write it"
    check(case, Launch(interpret=True, route="mosaic"))


@needs_mosaic
@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_blocks_by_mosaic_on_a_gpu_are_those_of_the_interpreter(case):
    if reason := route.unwritten(case.writer.blocks):
        pytest.skip(reason)
    assert not (wrong := off_by_rounding(case, Launch(route="mosaic"))), wrong


def test_some_pools_have_more_outliers_than_slots_and_equal_ones():
    """Show that the test above shows which outliers are kept."""

    @functools.partial(jax.jit, static_argnums=0)
    def dropped(codec: Codec, params: Tree, rows: jax.Array) -> jax.Array:
        body = codec.quantize(params, (), rows, GENERATED)
        return jnp.sum(codec.facts.outliers.counts(body).dropped)

    outliers = CASES[6], CASES[7], CASES[10]
    counts = [int(dropped(*case.layer[:2], rows_of(case, 1))) for case in outliers]
    assert max(counts) > min(counts) == 0, counts
    coarse = np.asarray(rows_of(CASES[-1], 1))[1]
    assert len(np.unique(np.abs(coarse))) < coarse.size / 50


def test_formats_that_it_cannot_write_are_refused():
    layout, ring = CASES[6].layer[0].facts.code_layout, jnp.zeros((1, 2, 64, 64))
    with pytest.raises(ValueError, match="rows of 128 channels do not fill 4 chunks of 16"):
        TableBlocks(layout, 64).check(jnp.zeros((1, 2, 64, 128)), 32)
    with pytest.raises(ValueError, match="48 tokens that share slots must be a multiple of 32"):
        TableBlocks(layout, None, slots=Slots(48, 9, True)).check(ring, 96)
    with pytest.raises(ValueError, match="groups of 24 channels must be whole chunks of 16"):
        TableBlocks(layout, 24).check(ring, 32)
    with pytest.raises(
        ValueError,
        match="groups of 1 heads: kernels take groups of one or of all, and of all with outliers",
    ):
        TableBlocks(layout, 64, slots=Slots(32, 9, False), per_side=1).check(ring, 32)


@each_lowering(CASES, (CASES[0], CASES[3], *CASES[6:9]))
def test_every_case_lowers_for_cuda(case, arithmetic):
    assert "append_token" in lowered(case, Launch(arithmetic)), "the kernel has lost its name"


@needs_mosaic
@pytest.mark.parametrize("case", some(CASES, [CASES[2]]), ids=lambda case: case.id)
def test_blocks_on_mosaic_gpu_lower_for_cuda(case):
    if reason := route.unwritten(case.writer.blocks):
        pytest.skip(reason)
    text = lowered(case, Launch(route="mosaic"))
    assert "mosaic_gpu" in text
    assert "triton" not in text


def lowered(case: WriterCase, launch: Launch) -> str:
    body = jax.eval_shape(functools.partial(quantized, case), rows_of(case, BODY))
    ring, place = rows_of(case, 1).astype(jnp.bfloat16), jnp.zeros(len(LEAVING), jnp.int32)
    return lower_for_cuda(
        lambda *inputs: append(case, *inputs, launch=launch),
        *(body, ring, ring[:, :, :1], Places(place, LEAVING, place, place, LEAVING)),
    )


def off_by_rounding(case: WriterCase, launch: Launch) -> list[str]:
    """Name the arrays in which more than two entries in a hundred differ, floats by more than their
    rounding. Coarse rows have ties, say of two gaps between angles, and a device may break one in
    its own way: that moves all codes of a group, of which there are a hundred.
    """
    _, _, block = case.layer
    before, after, rows, place = run(case, 2 * block, np.array([block, 0, 2 * block]), launch)
    # For a GPU, XLA drops some roundings of interpreted kernels (uniform.as_stored).
    with jax.default_device(jax.devices("cpu")[0]):
        _, wanted, _, _ = run(case, 2 * block, np.array([block, 0, 2 * block]), INTERPRETED)
    assert wrong_in(case, before, after, rows[:, ::-1], place), "the heads could be exchanged"

    def differ(actual: jax.Array, expected: jax.Array) -> np.ndarray:
        if actual.dtype == jnp.float16:
            return ~np.isclose(actual, expected, rtol=2.0**-9)
        return np.asarray(actual) != np.asarray(expected)

    pairs = [differ(*pair) for pair in zip(after, wanted, strict=True)]
    others = [differ(jnp.roll(a, 1, axis=-1), b) for a, b in zip(after, wanted, strict=True)]
    assert max(other.mean() for other in others) > 0.1, "neighbours would pass"
    return [f"array {i}: {d.mean():.1e}" for i, d in enumerate(pairs) if d.mean() > 2e-2]


@on_a_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_runs_on_a_gpu(case, arithmetic):
    assert not (wrong := off_by_rounding(case, Launch(arithmetic))), wrong
