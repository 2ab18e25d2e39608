"""SQuat adds to KIVI a subspace of the prompt's queries, options and presets. Its corrections
are in test_squat_corrections.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import grouped_array
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
    prefill,
    row_errors,
    run,
    sequences,
)
from tests.kvq_jax.origins import PROMPT

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
    def test_it_is_that_of_all_valid_queries_of_a_kv_heads_group(self):
        """A ragged batch against float64 SVDs of each row and head; the padding is NaN."""
        tokens, lengths = sequences(), np.array([90, 61, 40, 16, 7, 3, 2, 1], np.int32)
        found = statistics(SPEC, tokens, lengths)
        for b, n in enumerate(lengths):
            for k in range(2):
                q = tokens.q[b, 2 * k : 2 * k + 2, :n].reshape(-1, 32).astype(np.float64)
                _, s, v = np.linalg.svd(q, full_matrices=False)
                p = np.eye(32) + 0.01 * (v[:3].T * s[:3] ** 2) @ v[:3]
                wanted = -np.linalg.solve(p[16:, 16:], p[16:, :16])
                np.testing.assert_allclose(
                    found[b, k], wanted, atol=2e-5, err_msg=f"row {b}, head {k}"
                )
        assert np.abs(found[0] - found[0, ::-1]).max() > 1e-2, (
            "both heads have one subspace: the comparison says nothing"
        )

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

    def test_generated_tokens_and_later_prompts_leave_it(self):
        plan, state = empty(SPEC)
        tokens, half = sequences(), FULL // 2
        _, after, _ = prefill(plan, (), state, tokens.window(ZERO, half, CAPACITY), ())
        _, later = run(plan, after, tokens, ZERO, ZERO)
        _, second, _ = prefill(plan, (), later, tokens.window(half, half + 20, CAPACITY), ())
        np.testing.assert_array_equal(after.stats[0], second.stats[0])
        assert np.abs(np.asarray(after.stats[0])).max() > 1e-2

    def test_an_infinite_query_counts_as_zero_there(self):
        tokens = sequences()
        broken, zeroed = tokens.q.copy(), tokens.q.copy()
        broken[:, :, 3, 5], zeroed[:, :, 3, 5] = np.inf, 0
        found = statistics(SPEC, with_queries(tokens, broken))
        np.testing.assert_array_equal(found, statistics(SPEC, with_queries(tokens, zeroed)))

    def test_it_is_that_of_the_svd_where_the_spectrum_is_flat(self):
        """Queries without preferred directions, whose singular values differ by percents. Ten steps
        of the block power iteration that the paper proposes as a substitute for the SVD leave one
        code in fifty another than the SVD's.
        """
        rng = np.random.default_rng(3)
        queries, keys = (
            rng.normal(size=(1, 1, tokens, 64)).astype(np.float32) for tokens in (512, 128)
        )
        matrix = subspace.gram(jnp.asarray(queries), jnp.ones((1, 512), bool), 1)
        _, s, v = np.linalg.svd(queries[0, 0].astype(np.float64), full_matrices=False)
        assert s[0] < 1.1 * s[5], "the spectrum falls"

        basis = np.linalg.qr(rng.normal(size=(64, 9)))[0]
        for _ in range(10):
            basis = np.linalg.qr(np.asarray(matrix[0, 0], np.float64) @ basis)[0]
        values, inside = np.linalg.eigh(basis.T @ np.asarray(matrix[0, 0], np.float64) @ basis)
        ten_steps = values[:3:-1], (basis @ inside)[:, :3:-1]

        codec = key_codec("squat:lam=0.01", dataclasses.replace(DIMS, head_dim=64))

        def codes(values: np.ndarray, vectors: np.ndarray) -> np.ndarray:
            as_jax = (jnp.asarray(a[None, None], jnp.float32) for a in (values, vectors))
            body = codec.quantize(
                (), subspace.updates(*as_jax, 0.01, 32), jnp.asarray(keys), PROMPT
            )
            return np.asarray(grouped_array.codes(body))

        wanted = codes(s[:5] ** 2, v[:5].T)
        found = codes(*(np.asarray(a)[0, 0] for a in subspace.directions(matrix, 5)))
        assert np.mean(found != wanted) <= 1e-4
        assert np.mean(codes(*ten_steps) != wanted) > 0.01, (
            "ten steps of power iteration would pass"
        )

    def test_on_cpus_lapack_gets_one_matrix_at_a_time(self):
        """JAX 0.10 lets threads wait for parts of a batch that only they could work on: layers side
        by side then wait for ever."""

        def batches(function: Callable) -> list[int]:
            text = (
                jax.jit(function)
                .lower(jnp.eye(32)[None, None] * jnp.ones((3, 2, 1, 1)))
                .compile()
                .as_text()
            )
            shapes = re.findall(r"= \(?f32\[([\d,]+)\][^\n]*lapack_s(?:potrf|syevd)_ffi", text)
            return [int(np.prod([int(n) for n in shape.split(",")[:-2]])) for shape in shapes]

        assert set(batches(lambda m: subspace.corrections(m, 3, 0.01, 16))) == {1}
        assert max(batches(lambda m: subspace.directions(m, 3))) == 6, (
            "the search for batches finds none"
        )

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

    def test_shared_it_is_the_first_rows_for_all_and_so_depends_on_the_batch(self):
        """An experiment outside the table of methods: it breaks the law that rows are
        independent."""
        tokens, lengths = (
            sequences(),
            np.array([0, 70, *FULL[2:]], np.int32),
        )  # the first row has no prompt
        own, shared = (
            statistics(SPEC, tokens, lengths),
            statistics(SPEC.replace("rank", "shared_subspace=true,rank"), tokens, lengths),
        )
        for row in shared:
            np.testing.assert_allclose(row, own[1], atol=1e-6)
        assert np.abs(own[2] - own[1]).max() > 1e-2


def test_without_weight_it_is_kivi():
    """lam = 0: the same codec. A lam that vanishes in fp32: the same codes."""
    tokens = sequences()
    for name, pre in (("squat", "false"), ("squat_pre", "true")):
        plan, plain = empty(f"{name}:bits=3,lam=0")[0], empty(f"kivi:bits=3,pre_rope={pre}")[0]
        assert plan.codecs == plain.codecs
    assert empty("squat:bits=3,lam=0.1")[0].codecs != empty("kivi:bits=3")[0].codecs
    inputs = tokens.window(ZERO, FULL, CAPACITY)
    tiny, wanted = (kvq.roundtrip_layer(s, inputs)[0] for s in ("squat:lam=1e-30", "kivi"))
    assert row_errors(tiny, wanted).max() <= ROUNDING
    assert row_errors(kvq.roundtrip_layer("squat:lam=0.1", inputs)[0], wanted).max() > 0.1


def test_the_whole_error_is_nearly_orthogonal_to_the_prompts_strongest_queries():
    tokens = sequences()
    direction = np.random.default_rng(5).normal(size=32)
    aligned = with_queries(tokens, tokens.q + 3 * direction)
    inputs = aligned.window(ZERO, FULL, CAPACITY)

    def projected(spec: str) -> float:
        error = np.asarray(kvq.roundtrip_layer(spec, inputs)[0]) - tokens.k_rot
        return float(np.linalg.norm(error @ direction) / np.linalg.norm(direction))

    plain = projected("kivi")
    assert projected("squat:rank=1,lam=0.01") < 0.6 * plain
    assert projected("squat:rank=1,lam=1e-6") > 0.9 * plain


@pytest.mark.parametrize("entry", [np.inf, np.nan])
def test_a_key_entry_that_is_not_finite_corrects_nothing(entry: float):
    tokens = sequences()
    broken = tokens.k_rot.copy()
    broken[:, :, 21, 2] = entry
    codec = key_codec(SPEC)
    stats = jnp.asarray(statistics(SPEC, tokens))
    found, whole = (
        np.asarray(
            codec.dequantize(
                (), stats, codec.quantize((), stats, jnp.asarray(k[:, :, :80]), PROMPT)
            )
        )
        for k in (broken, tokens.k_rot)
    )
    assert np.isfinite(found).all()
    others = np.arange(80) // 16 != 21 // 16  # tokens of other groups
    np.testing.assert_array_equal(found[:, :, others], whole[:, :, others])
    error = np.abs(found[:, :, 21, 3:] - tokens.k_rot[:, :, 21, 3:])
    assert error.mean() < 1.5 * np.abs(whole[:, :, 21, 3:] - tokens.k_rot[:, :, 21, 3:]).mean()


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
        kvq.roundtrip("squat", k, v)
    found = kvq.roundtrip("squat:lam=0.1", k, v, q)[0]
    assert (
        np.abs(
            np.asarray(found - kvq.roundtrip("squat:lam=0.1", k, v, jnp.roll(q, 1, axis=-1))[0])
        ).max()
        > 0.1
    )


@pytest.mark.parametrize(
    ("preset", "written"),
    [
        (
            "squat:preset=llama-3.1-8b-longbench",
            "squat:rank=10,lam=0.0005,block_channels=64,group_size=32,recent=0",
        ),
        (
            "squat_pre:preset=llama-3.1-8b-longbench",
            "squat_pre:rank=60,lam=0.0005,block_channels=32,group_size=32,recent=0",
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


@pytest.mark.parametrize("method", [kvq.METHODS["squat"], kvq.METHODS["squat_pre"]])
def test_every_preset_fits_a_model_of_head_dim_128(method):
    specs = {name: kvq.parse(f"{method.name}:preset={name}") for name in method.presets}
    for spec in specs.values():
        spec.layer(0, CacheDims(1, 8, 2, 128, 1024), 256, "bfloat16")
        assert (spec.sink, spec.recent, spec.block) == (0, 0, 32)
    assert len(set(specs.values())) > 1


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (
            "squat:preset=gpt",
            (
                "preset=gpt",
                "lm-eval, llama-2-7b-longbench, llama-3.1-8b-longbench, mistral-7b-v0.3-longbench",
            ),
        ),
        ("kivi:preset=lm-eval", ("'preset'", "kivi")),
        ("squat:presets=lm-eval", ("'presets'", "preset, sink")),
        ("squat:bits=8", ("bits=8", "2, 3, 4")),
        ("squat:rank=0", ("rank=0", "head_dim (32)")),
        ("squat:rank=33", ("rank=33", "head_dim (32)")),
        ("squat:lam=-1", ("lam=-1",)),
        ("squat:lam=nan", ("lam=nan",)),
        ("squat:ahead=-1", ("ahead=-1",)),
        ("squat_pre:ahead=8", ("'ahead'", "queries")),
        ("squat:block_channels=32", ("block_channels=32", "head_dim 32", "kivi")),
    ],
)
def test_errors_name_what_is_wrong_and_what_is_allowed(spec: str, parts: tuple[str, ...]):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        kvq.init_cache(spec, DIMS, 1, 64)
    for part in parts:
        assert part in str(error.value)
