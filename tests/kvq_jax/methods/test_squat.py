"""SQuat adds to KIVI a subspace of the prompt's queries, options and presets. Its corrections
are in test_squat_corrections.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.methods.squat import subspace
from kvq_jax.methods.squat.codec import SquatCodec
from kvq_jax.types.rope import rotate
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    ROUNDING,
    Sequences,
    beyond_rounding,
    empty,
    live,
    row_errors,
    run,
    sequences,
)

SPEC = "squat:rank=3,lam=0.01,recent=4,block=16"
KIVI = "kivi:recent=4,block=16"
FULL = np.full(8, CAPACITY, np.int32)
ZERO = np.zeros(8, np.int32)


def key_codec(spec: str, dims: CacheDims = DIMS) -> SquatCodec:
    found = kvq.parse(spec).layer(0, dims, 256, "float32").k
    assert isinstance(found, SquatCodec)
    return found


def statistics(spec: str, tokens: Sequences, lengths: np.ndarray = FULL) -> np.ndarray:
    """[B, K, H - g, last] of these prompts."""
    return np.asarray(key_codec(spec).statistics.of((), tokens.window(ZERO, lengths, CAPACITY)))


def with_queries(tokens: Sequences, q: np.ndarray) -> Sequences:
    return dataclasses.replace(tokens, q=q.astype(np.float32))


class TestSubspace:
    def test_it_is_empty_without_a_prompt_and_keys_are_then_coded_as_kivi_does(self):
        tokens = sequences()
        plan, state = empty(SPEC)
        plain, plain_state = empty(KIVI)
        codes = {}
        for name, prompt in (("none", ZERO), ("prompt", FULL // 2)):
            _, after = run(plan, state, tokens, prompt, FULL)
            codes[name] = {
                n: a for n, a in live(plan, after, FULL).items() if not n.startswith("stats")
            }
        _, after = run(plain, plain_state, tokens, ZERO, FULL)
        assert not beyond_rounding(codes["none"], live(plain, after, FULL))
        assert beyond_rounding(codes["prompt"], live(plain, after, FULL)), (
            "a subspace changes no code"
        )

    def test_an_infinite_query_counts_as_zero_there(self):
        tokens = sequences()
        broken, zeroed = tokens.q.copy(), tokens.q.copy()
        broken[:, :, 3, 5], zeroed[:, :, 3, 5] = np.inf, 0
        found = statistics(SPEC, with_queries(tokens, broken))
        np.testing.assert_array_equal(found, statistics(SPEC, with_queries(tokens, zeroed)))

    def test_normalized_it_does_not_grow_with_the_prompt(self):
        tokens = sequences()
        once = FULL // 2
        twice = with_queries(tokens, np.concatenate([tokens.q[:, :, :45]] * 2, axis=2))
        normalized = SPEC.replace("lam=0.01", "lam=1,normalize=true")
        np.testing.assert_allclose(
            statistics(normalized, twice), statistics(normalized, tokens, once), atol=1e-5
        )
        assert np.abs(statistics(SPEC, twice) - statistics(SPEC, tokens, once)).max() > 1e-2
        as_plain = statistics(
            f"squat:rank=3,lam={0.01 * CAPACITY},normalize=true,recent=4,block=16", twice
        )
        np.testing.assert_allclose(as_plain, statistics(SPEC, twice), atol=1e-5)

    def test_queries_before_rope_span_it_only_where_asked_for(self):
        tokens = sequences()
        inputs = tokens.window(ZERO, FULL, CAPACITY)
        rolled = dataclasses.replace(inputs, q_pre=jnp.roll(inputs.q_pre, 1, axis=-1))
        for options, changed in (("", False), (",queries=before_rope", True)):
            codec = key_codec(f"squat_pre:rank=3,lam=0.01{options}")
            one, other = (np.asarray(codec.statistics.of((), i)) for i in (inputs, rolled))
            assert (np.abs(one - other).max() > 1e-2) == changed
        with pytest.raises(ValueError, match="q_pre"):
            key_codec("squat_pre:queries=before_rope").statistics.of(
                (), dataclasses.replace(inputs, q_pre=None)
            )

    def test_queries_can_be_turned_to_the_positions_that_follow_each_prompt(self):
        """Against Q^T Q of queries that were rotated there one position after the other; an
        attention factor scales them as RoPE does."""
        tokens, lengths, ahead = sequences(), np.array([90, 61, 40, 16, 7, 3, 2, 1], np.int32), 20
        inputs = tokens.window(ZERO, lengths, CAPACITY)
        assert inputs.rope is not None
        rope = dataclasses.replace(inputs.rope, attention_factor=jnp.asarray(1.5))

        def gram(queries: jnp.ndarray) -> np.ndarray:
            return np.asarray(subspace.gram(queries, inputs.valid, 2))

        def asked(later: int) -> np.ndarray:
            there = jnp.broadcast_to(jnp.asarray(lengths)[:, None] + later, inputs.positions.shape)
            return gram(rotate(inputs.q_pre, there, rope))

        wanted = np.mean([asked(later) for later in range(ahead)], axis=0)
        found = np.asarray(
            subspace.turned(jnp.asarray(gram(inputs.q_pre)), jnp.asarray(lengths), ahead, rope)
        )
        np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
        for what, other in (
            ("their own positions", gram(inputs.q_rot) * 1.5**2),
            ("the first of them", asked(0)),
        ):
            assert np.abs(other - wanted).max() > 0.1 * np.abs(wanted).max(), f"{what} would pass"

        spec = "squat:rank=32,lam=0.01"
        plain, turned = (
            np.asarray(key_codec(f"{spec}{o}").statistics.of((), inputs))
            for o in ("", f",ahead={ahead}")
        )
        assert np.abs(plain - turned).max() > 1e-2
        for missing in ("q_pre", "rope"):
            with pytest.raises(ValueError, match=r"ahead=20 needs q_pre and the model's rope"):
                key_codec(f"{spec},ahead={ahead}").statistics.of(
                    (), dataclasses.replace(inputs, **{missing: None})
                )


def test_without_weight_it_is_kivi():
    """lam = 0: the same codec. A lam that vanishes in fp32: the same codes."""
    tokens = sequences()
    for name, pre in (("squat", "false"), ("squat_pre", "true")):
        plan, plain = empty(f"{name}:bits=3,lam=0")[0], empty(f"kivi:bits=3,pre_rope={pre}")[0]
        assert plan.codecs == plain.codecs
    assert empty("squat:bits=3,lam=0.1")[0].codecs != empty("kivi:bits=3")[0].codecs
    inputs = tokens.window(ZERO, FULL, CAPACITY)
    tiny, wanted = (kvq.cache.roundtrip_layer(s, inputs)[0] for s in ("squat:lam=1e-30", "kivi"))
    assert row_errors(tiny, wanted).max() <= ROUNDING
    assert row_errors(kvq.cache.roundtrip_layer("squat:lam=0.1", inputs)[0], wanted).max() > 0.1


def test_kernels_read_it_as_kivi_and_none_quantizes_it():
    dims = CacheDims(1, 8, 2, 128, 1024)
    for spec, plain in (("squat", "kivi"), ("squat_pre:bits=4", "kivi:bits=4,pre_rope=true")):
        ours, kivi = (kvq.parse(s).layer(0, dims, 1024, "bfloat16") for s in (spec, plain))
        assert not isinstance(ours.k.kernels.reader(), str)
        assert ours.k.kernels.reader() == kivi.k.kernels.reader()
        assert ours.v == kivi.v
        assert ours.k.kernels.writer((), (), True) is None
        body = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kivi.k.body(1, 2, 64))
        assert len(ours.k.kernels.arrays((), body)) == len(kivi.k.kernels.arrays((), body))


def test_roundtrip_asks_for_the_queries():
    tokens = sequences()
    k, v, q = (jnp.asarray(a) for a in (tokens.k_rot, tokens.v, tokens.q))
    with pytest.raises(ValueError, match="queries"):
        kvq.roundtrip("squat", k, v, layout="BNTH")
    found, other = (
        kvq.roundtrip("squat:lam=0.1", k, v, queries, layout="BNTH")[0]
        for queries in (q, jnp.roll(q, 1, axis=-1))
    )
    assert np.abs(np.asarray(found - other)).max() > 0.1


@pytest.mark.parametrize(
    ("preset", "written"),
    [
        (
            "squat:preset=llama-3.1-8b-longbench",
            "squat:rank=10,lam=0.0005,block_channels=64,group_size=32,recent=0",
        ),
        (
            "squat:preset=llama-2-7b-longbench,lam=0.1,recent=64",
            "squat:rank=40,lam=0.1,block_channels=64,group_size=32,recent=64",
        ),
        (
            "k=squat_pre:preset=lm-eval+v=kivi+cache:recent=8",
            "k=squat_pre:block_channels=64,group_size=32+v=kivi+cache:recent=8",
        ),
    ],
)
def test_a_preset_stands_for_the_papers_options_and_a_given_option_wins(preset: str, written: str):
    assert kvq.parse(preset) == kvq.parse(written)
    assert kvq.parse(str(kvq.parse(preset))) == kvq.parse(preset)


@pytest.mark.parametrize("method", [kvq.methods.METHODS["squat"], kvq.methods.METHODS["squat_pre"]])
def test_every_preset_fits_a_model_of_head_dim_128(method):
    specs = {name: kvq.parse(f"{method.name}:preset={name}") for name in method.presets}
    for spec in specs.values():
        spec.layer(0, CacheDims(1, 8, 2, 128, 1024), 256, "bfloat16")
        assert (spec.sink, spec.recent, spec.block) == (0, 0, 32)
    assert len(set(specs.values())) > 1
