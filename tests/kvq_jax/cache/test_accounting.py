"""Layouts, axes and byte counts: what is promised is what is allocated."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.cache.cache import CacheDims, plans
from kvq_jax.codecs.codec import Codec, Side, TokensAt, side_rows
from kvq_jax.codecs.facts import Facts, OutlierCounts, Outliers
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.methods.base import Method, Windows
from kvq_jax.methods.registry import METHODS
from kvq_jax.types.array_types import Axis, AxisName, RowsBKTH
from kvq_jax.types.pytree import describe, pytree
from tests.kvq_jax.origins import PROMPT
from tests.kvq_models.checkpoints import tiny_config
from tests.methods_table import MethodCase, cases

DIMS = CacheDims(3, 4, 2, 32, 128)


@cases(every=True)
def test_a_cache_is_allocated_as_its_layout_and_its_axes_promise(case: MethodCase):
    for dtype, capacity in (("float32", 1), ("bfloat16", 90)):
        arguments = case.spec, DIMS, 2, capacity, dtype
        layout, specs = kvq.cache.layout(*arguments), kvq.cache.axes(*arguments)
        cache = kvq.init_cache(*arguments)
        assert jax.tree.structure(layout) == jax.tree.structure(specs) == jax.tree.structure(cache)
        assert jax.tree.structure(cache.axes) == jax.tree.structure(specs)
        assert jax.tree.leaves(cache.axes) == jax.tree.leaves(specs)
        for (path, leaf), struct, spec in zip(
            jax.tree_util.tree_leaves_with_path(cache),
            jax.tree.leaves(layout),
            jax.tree.leaves(specs),
            strict=True,
        ):
            name = jax.tree_util.keystr(path)
            promised = {(one.shape, one.dtype) for one in (struct, spec.struct)}
            assert promised == {(leaf.shape, leaf.dtype)}, name
            assert spec.names[0] == "batch", f"{name} starts with {spec.names[0]}"
            assert leaf.shape[0] == 2, f"{name} has no batch axis"
            assert set(spec.names) <= set(get_args(AxisName)), f"{name} has unknown axes"
            named = [axis for axis in spec.names if axis != "none"]
            assert len(set(named)) == len(named), f"{name} has an axis twice: {named}"
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert {kvq.size.nbytes(tree) for tree in (layout, specs, cache)} == {held}
        buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache) if leaf.size]
        assert len(set(buffers)) == len(buffers), "two arrays share a buffer"
        parts = kvq.size.components(cache)
        assert sum(part.bytes for part in parts) == held
        names = [(part.side, part.name) for part in parts]
        assert len(set(names)) == len(names), "a component is listed twice"
        for name in ("sink", "ring", "stats"):
            of_layers = kvq.size.nbytes([getattr(layer, name) for layer in cache.layers])
            assert sum(part.bytes for part in parts if part.name == name) == of_layers, name


def test_body_bits_do_not_depend_on_the_dtype_of_the_model():
    for spec in ("dense", "k=kivi:bits=2+v=dense"):
        bits = {
            kvq.size.body_bits_per_element(spec, dataclasses.replace(tiny_config(), dtype=dtype))
            for dtype in ("float32", "bfloat16")
        }
        assert bits == {16.0 if spec == "dense" else 9.5}, spec


def test_windows_count_and_fade_with_the_context():
    dims = CacheDims(2, 8, 2, 128, 1024)
    short, long = (kvq.size.bits_per_element("kivi:bits=2", dims, s) for s in (1024, 65536))
    assert 3.0 < long < 3.1 < short
    assert kvq.size.bits_per_element("dense", dims, 65536) == pytest.approx(16, rel=1e-3)


def test_dense_bytes_are_those_of_a_plain_cache():
    dims = CacheDims(2, 8, 2, 128, 1024)
    assert kvq.size.dense_nbytes(dims, 3, 100) == 2 * 2 * 3 * 2 * 100 * 128 * 2


# A method that nothing else knows: the sign of each entry, the mean size of each head's row, and
# the largest entry of each head exact


@pytree
@dataclasses.dataclass(frozen=True)
class SignsAndLargest:
    """signs [B, K, S, H] int8, size [B, K, S], and of the largest entry its channel and value [B,
    K, S], -1 where a row is zero."""

    signs: Int[Array, "B K S H"]
    size: Float[Array, "B K S"]
    channel: Int[Array, "B K S"]
    largest: Float[Array, "B K S"]


@dataclasses.dataclass(frozen=True)
class SignsCodec(Codec):
    side: Side
    channels: int

    def rows(self, params, inputs) -> RowsBKTH:
        return side_rows(inputs, self.side)

    def body(self, batch: int, heads: int, tokens: int) -> SignsAndLargest:
        axes = Axis("batch", batch), Axis("kv_heads", heads), Axis("tokens", tokens)
        one, channel = BodySpec(axes, "float32"), BodySpec(axes, "int16")
        signs = BodySpec((*axes, Axis("channels", self.channels)), "int8")
        return describe(SignsAndLargest, signs=signs, size=one, channel=channel, largest=one)

    @property
    def facts(self) -> Facts:
        return Facts(outliers=Outliers(slots=lambda heads: heads, counts=_counts))

    def quantize(self, params, stats, rows, at: TokensAt) -> SignsAndLargest:
        channel = jnp.argmax(jnp.abs(rows), axis=-1)
        largest = jnp.take_along_axis(rows, channel[..., None], axis=-1)[..., 0]
        size = jnp.mean(jnp.abs(rows), axis=-1)
        channel = jnp.where(size > 0, channel, -1).astype(jnp.int16)
        return SignsAndLargest(jnp.sign(rows).astype(jnp.int8), size, channel, largest)

    def dequantize(self, params, stats, body) -> RowsBKTH:
        here = jnp.arange(self.channels) == body.channel[..., None]
        return jnp.where(here, body.largest[..., None], body.signs * body.size[..., None])


def _counts(body: SignsAndLargest) -> OutlierCounts:
    kept = jnp.sum(body.channel >= 0, axis=1, dtype=jnp.int32)
    return OutlierCounts(kept, jnp.zeros_like(kept))


@dataclasses.dataclass(frozen=True)
class Toy(Method):
    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "signs"
    source: ClassVar[str] = "-"

    def windows(self) -> Windows:
        return Windows(sink=1, recent=2, block=4)

    def codec(self, side, layer, dims, block, dtype) -> Codec:
        return SignsCodec(side, dims.head_dim)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(METHODS, "toy", Toy())
    yield
    plans.cache_clear()


@pytest.mark.parametrize("wrapped", ["", "subtract_bias=true"])
def test_an_unknown_methods_outliers_are_counted(toy: None, wrapped: str):
    assert kvq.size.outlier_fraction(f"toy:{wrapped}".rstrip(":"), DIMS) == 1 / DIMS.head_dim
    assert (
        kvq.size.outlier_fraction(f"k=toy+v=kivi{wrapped and '+cache:'}{wrapped}", DIMS)
        == 0.5 / DIMS.head_dim
    )
    assert kvq.size.body_bits_per_element("toy", DIMS) == 8 + (32 + 16 + 32) / DIMS.head_dim


def test_an_unknown_methods_outliers_in_a_cache_are_those_of_its_live_tokens(toy: None):
    cache = kvq.init_cache("toy", DIMS, 2, 40, "float32")
    # sink 1, recent 2: two blocks of 4 of the first row have aged, none of the second
    lengths = jnp.asarray([3 + 8 + 1, 2], jnp.int32)
    plan, heads = cache.plans[0], DIMS.num_key_value_heads
    rows = jnp.ones((2, heads, plan.regions.body_capacity, DIMS.head_dim))
    rows = rows.at[:, 0, 5].set(0)  # a row without an outlier
    bodies = tuple(codec.quantize((), (), rows, PROMPT) for codec in plan.codecs)
    layers = tuple(dataclasses.replace(layer, body=bodies) for layer in cache.layers)
    filled = dataclasses.replace(cache, layers=layers, lengths=lengths)
    kept = DIMS.num_hidden_layers * 2 * (8 * heads - 1)
    assert kvq.size.dropped_outliers(filled) == (0, kept)


def test_outliers_of_a_long_body_are_those_of_its_live_tokens_too(toy: None):
    """A token's number times the body's tokens does not fit int32."""
    cache = kvq.init_cache("toy", kvq.CacheDims(1, 1, 1, 8, 8), 1, 60_003, "float32")
    [plan], [layer] = cache.plans, cache.layers
    rows = jnp.ones((1, 1, plan.regions.body_capacity, 8))
    bodies = tuple(codec.quantize((), (), rows, PROMPT) for codec in plan.codecs)
    filled = dataclasses.replace(
        cache,
        layers=(dataclasses.replace(layer, body=bodies),),
        lengths=jnp.asarray([3 + 8], jnp.int32),
    )
    assert kvq.size.dropped_outliers(filled) == (0, 2 * 8)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("count", "given", "message"),
    [
        (kvq.size.dense_nbytes, (DIMS, -3, 8), "batch=-3 must be an integer of at least 1"),
        (kvq.size.dense_nbytes, (DIMS, 1, "100"), "capacity='100' must be an integer of at least"),
        (kvq.size.dense_nbytes, (DIMS, 1, 0), "capacity=0 must be an integer of at least 1"),
        (kvq.size.bits_per_element, ("kivi", DIMS, 0), "capacity=0 must be an integer of at least"),
        (kvq.size.body_bits_per_element, ("kivi", DIMS, 0), "capacity=0 must be an integer of at"),
    ],
)
def test_a_batch_or_a_capacity_that_no_cache_has_is_refused(
    count: Callable[..., Any], given: tuple[Any, ...], message: str
):
    with pytest.raises(ValueError, match=rf"\A{message}[^\n]*\Z"):
        count(*given)


def test_a_codec_that_stores_its_own_arrays_states_its_own_facts():
    with pytest.raises(TypeError, match="GroupedAndMore defines body, so it must define facts too"):

        class GroupedAndMore(GroupedCodec):
            def body(self, batch, heads, tokens):
                return super().body(batch, heads, tokens), SignsAndLargest

    with pytest.raises(TypeError, match="Silent defines body, so it must define facts too"):

        class Silent(Codec):
            def body(self, batch, heads, tokens):
                return ()
