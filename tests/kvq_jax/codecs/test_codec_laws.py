"""Laws that every codec of the table obeys: wrappers forward, degenerate entries stay in their
token, and what happens to rows that are quantized again is a declared fact."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.rotations import turn_back
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_jax.codecs.codec import Codec, TokensAt
from kvq_jax.codecs.wrapper import MEMBERS, Wrapper
from kvq_jax.layer.plan import LayerPlan
from tests.kvq_jax.codecs.test_codec_facts import BATCH, codecs_and_rows, described, stored
from tests.kvq_jax.layer_runs import DIMS, empty, parameters_of, sequences, with_small_chunks
from tests.methods_table import MethodCase, cases

TOKENS, STEPS = 60, 4
TOKEN, CHANNELS = 5, np.array([0, 3, -1])  # of the entries that are made degenerate


class Identity(Wrapper):
    """A wrapper that changes nothing."""


class Halving(Wrapper):
    """Control: a wrapper that changes what is stored."""

    def quantize(self, params: Any, stats: Any, rows: Any, at: TokensAt) -> Any:
        return self.inner.quantize(params, stats, rows / 2, at)


class Elsewhere(Wrapper):
    """Control: a wrapper that loses the positions."""

    def quantize(self, params: Any, stats: Any, rows: Any, at: TokensAt) -> Any:
        lost = at._replace(positions=at.positions + 1000)
        return self.inner.quantize(params, stats, rows, lost)


def wrapped(plan: LayerPlan, wrap: Callable[[Codec], Codec]) -> LayerPlan:
    return dataclasses.replace(plan, k=wrap(plan.k), v=wrap(plan.v))


def program(plan: LayerPlan, wrap: Callable[[Codec], Codec] | None = None) -> str:
    """Return a prompt and a step after it, traced: the operations that make the attention of both
    and the state that they leave."""
    traced_plan = plan if wrap is None else wrapped(plan, wrap)

    def run(params: Any, prompt: Any, after: Any, carry: Any) -> Any:
        state = traced_plan.init(BATCH, "float32")
        first, state, _ = prefill_layer(traced_plan, params, state, prompt, carry)
        second, state, _ = decode_layer(traced_plan, params, state, after, carry)
        return first, second, state

    text, params = sequences(BATCH), parameters_of(plan)
    start, middle, end = (np.full(BATCH, n, np.int32) for n in (0, TOKENS, TOKENS + STEPS))
    inputs = text.window(start, middle, TOKENS), text.window(middle, end, STEPS)
    traced = jax.make_jaxpr(with_small_chunks(run))(params, *inputs, text.below(plan))
    return f"{traced}\nconstants: {[np.asarray(a).tolist() for a in traced.consts]}"


@cases(every=True)
def test_a_wrapper_says_what_the_codec_inside_says(case: MethodCase):
    plan = empty(case.spec, batch=BATCH)[0]
    same = wrapped(plan, Identity)
    assert same.layout(BATCH, "float32") == plan.layout(BATCH, "float32")
    assert (same.joint, same.names) == (plan.joint, plan.names)
    for one, other in zip(same.codecs, plan.codecs, strict=True):
        facts, plain = described(one.facts), described(other.facts)
        for cross in (facts.pop("cross_layer"), plain.pop("cross_layer")):
            assert (cross is None) == (plan.cross_layer is None)
        assert facts == plain
        assert one.learning.key == other.learning.key
        assert one.learning.parameters(2) == other.learning.parameters(2)


@cases(
    *("kivi2", "innerq2_no_bias", "kvquant4", "squat2", "xquant4", "xquant_cl2", "zipcache42"),
    usual=("innerq2_no_bias", "xquant_cl2", "zipcache42"),
)
def test_a_wrapper_that_changes_nothing_changes_nothing(case: MethodCase):
    """The program of a wrapped codec has the same operations, in the same order. A row of each kind
    of parameters, statistics and sides."""
    plan, _ = empty(case.spec, batch=BATCH)
    assert program(plan, Identity) == program(plan)


@pytest.mark.parametrize(
    ("spec", "control"),
    [
        ("kivi:recent=8,block=16", Halving),
        ("zipcache:recent=8,block=16", Halving),
        ("zipcache:probes=4,recent=8,block=16", Elsewhere),
    ],
)
def test_a_wrapper_that_changes_something_is_seen(spec: str, control: type[Wrapper]):
    plan, _ = empty(spec, batch=BATCH)
    assert program(plan, control) != program(plan)


def test_a_wrapper_forwards_every_member_of_the_interface():
    assert len(MEMBERS) <= 14
    assert set(MEMBERS) <= set(vars(Wrapper))
    assert not Identity.__abstractmethods__


def decoded(
    plan: LayerPlan, codec: Codec, params: Any, inputs: kvq.types.LayerInputs, rows: Any
) -> Any:
    return stored(plan, codec, params, inputs, rows)[1]


def quantizing_codecs(case: MethodCase) -> list[tuple[LayerPlan, Codec, Any, Any, Any]]:
    """Return (plan, codec, parameters, inputs, rows in whole blocks) of sides that store codes."""
    return [side for side in codecs_and_rows(case) if not side[1].facts.exact]


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@cases(every=True)
def test_degenerate_entries_decode_to_finite_rows_and_stay_in_their_token(case: MethodCase):
    """Infinities and NaN change no other block, and no other token of their own by more than a
    tenth of its error. 3e38 is finite, so it may widen the range of the tokens that share its
    group."""
    for plan, codec, params, inputs, rows in quantizing_codecs(case):
        block = plan.regions.block
        first = TOKEN // block * block
        mates = [t for t in range(first, first + block) if t != TOKEN]
        others = [t for t in range(rows.shape[2]) if t not in (TOKEN, *mates)]
        exact = np.asarray(rows, np.float32)
        clean = np.asarray(decoded(plan, codec, params, inputs, rows), np.float32)
        usual = error(clean[0, :, mates], exact[0, :, mates])
        for entry in (np.inf, -np.inf, np.nan, 3e38, -3e38):
            spoiled = rows.at[0, 0, TOKEN, CHANNELS].set(entry)
            read = np.asarray(decoded(plan, codec, params, inputs, spoiled), np.float32)
            assert np.isfinite(read).all(), f"{entry} decodes to something that is not finite"
            np.testing.assert_array_equal(read[:, :, others], clean[:, :, others])
            if not np.isfinite(entry):
                assert error(read[0, :, mates], exact[0, :, mates]) <= 1.1 * usual + 1e-6, entry


class Naive(Wrapper):
    """Control: 8-bit codes with one scale per token and head, and no care for infinities."""

    def quantize(self, params: Any, stats: Any, rows: Any, at: TokensAt) -> Any:
        scale = jnp.max(jnp.abs(rows), axis=(2, 3), keepdims=True) / 127
        return jnp.round(rows / scale).astype(jnp.int8), scale

    def dequantize(self, params: Any, stats: Any, body: Any) -> Any:
        return body[0].astype(jnp.float32) * body[1]


def test_a_codec_that_divides_by_an_infinite_range_is_caught(monkeypatch: pytest.MonkeyPatch):
    case = MethodCase("control", "kivi:recent=8,block=16", 0, 0)
    broken = [(p, Naive(codec), *rest) for p, codec, *rest in quantizing_codecs(case)]
    monkeypatch.setitem(globals(), "quantizing_codecs", lambda _: broken)
    law = test_degenerate_entries_decode_to_finite_rows_and_stay_in_their_token
    with pytest.raises(AssertionError, match="not finite"):
        law(case)


def hard(rows: jax.Array) -> Iterator[jax.Array]:
    """Yield these rows, heavy-tailed ones, and rows whose rotation is heavy-tailed or a spike."""
    rng, shape = np.random.default_rng(11), rows.shape
    tails = rng.standard_t(1.5, size=shape)
    spikes = 0.02 * rng.standard_normal(shape)
    np.put_along_axis(spikes, rng.integers(0, shape[-1], (*shape[:-1], 1)), 1, axis=-1)
    yield rows
    for other in (tails, *(turn_back(jnp.asarray(x, jnp.float32)) for x in (tails, spikes))):
        yield jnp.asarray(other, rows.dtype)


@cases(every=True)
def test_requantizing_decoded_rows_is_exact_or_declared_to_drift(case: MethodCase):
    """Rows that drift may do so in some tokens alone."""
    for plan, codec, params, inputs, usual in quantizing_codecs(case):
        drifts, of_tokens = [], []
        for rows in hard(usual):
            once = decoded(plan, codec, params, inputs, rows)
            twice = decoded(plan, codec, params, inputs, once.astype(rows.dtype))
            pair = np.asarray(twice, np.float32), np.asarray(once, np.float32)
            drifts.append(error(*pair))
            tokens = (x.reshape(-1, x.shape[-1]) for x in pair)
            of_tokens += [error(a, b) for a, b in zip(*tokens, strict=True) if b.any()]
        if codec.facts.requantizes == "exact":
            assert max(drifts) < 2e-3, f"{max(drifts):.2e}: declare that it drifts"
        else:
            assert max(of_tokens) > 2e-3, f"{max(of_tokens):.2e}: it does not drift"


def test_what_is_learned_before_rope_is_not_taken_for_keys_after_it():
    learned = []
    for name, method in kvq.methods.METHODS.items():
        if "pre_rope" not in {field.name for field in method.options()}:
            continue
        learning = [
            kvq.parse(f"{name}:pre_rope={choice}").layer(0, DIMS, 256, "float32").k.learning
            for choice in ("true", "false")
        ]
        if all(one.fit and one.parameters(2) for one in learning):
            learned.append(name)
            assert learning[0].key != learning[1].key, name
    assert {"kvquant", "pq"} <= set(learned)
