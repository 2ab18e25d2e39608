"""subtract_bias=true: codes do not know the keys' bias, scores have its exact share, and what is
missing is named."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.codecs.bias_subtracting import BiasSubtracting, check_bias
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.types.rope import rotate
from tests.exhaustive import some
from tests.float64 import rotated
from tests.kvq_jax.layer_runs import (
    DIMS,
    Sequences,
    empty,
    key_bias,
    layer_weights,
    row_errors,
    sequences,
)
from tests.kvq_jax.origins import PROMPT

SPECS = (
    "int4:block=8",
    "kivi:bits=3,pre_rope=true,block=16",
    "polarquant:group_size=16",
    "squat:block=16",
)
TOKENS = 64
HEADS, WIDTH = DIMS.num_key_value_heads, DIMS.head_dim


def constant() -> np.ndarray:
    """[K, H]: 60 in two channels of each head, 0 elsewhere."""
    found = np.zeros((HEADS, WIDTH), np.float32)
    found[:, [3, 21]] = 60
    return found


def with_constant(tokens: Sequences, added: np.ndarray) -> Sequences:
    """Return the sequences of a model whose key bias is larger by `added`."""
    positions = jnp.broadcast_to(
        jnp.arange(tokens.v.shape[2], dtype=jnp.int32), tokens.v.shape[::2]
    )
    everywhere = jnp.broadcast_to(jnp.asarray(added)[None, :, None], tokens.v.shape)
    k_rot = tokens.k_rot + np.asarray(rotate(everywhere, positions, tokens.rope))
    return dataclasses.replace(tokens, k_pre=tokens.k_pre + added[None, :, None], k_rot=k_rot)


def yarn(tokens: Sequences) -> Sequences:
    """Return the same keys before RoPE in a model with an attention factor."""
    rope = dataclasses.replace(tokens.rope, attention_factor=jnp.asarray(1.25, jnp.float32))
    return dataclasses.replace(tokens, k_rot=tokens.k_rot * np.float32(1.25), rope=rope)


def coded(spec: str, tokens: Sequences, added: np.ndarray):
    """Return (the key codec, its parameters, statistics and body, queries, positions) for the first
    tokens; `added` is part of the keys."""
    codec = empty(spec, batch=2)[0].k
    params = codec.learning.from_weights(
        layer_weights(HEADS, WIDTH, key_bias(HEADS * WIDTH) + added.ravel())
    )
    length = np.full(2, TOKENS, np.int32)
    inputs = tokens.rows([0, 1]).window(0 * length, length, TOKENS)
    stats = codec.statistics.of(params, inputs)
    body = codec.quantize(params, stats, codec.rows(params, inputs).astype(jnp.float32), PROMPT)
    q = inputs.q_rot.reshape(2, HEADS, -1, WIDTH)
    return codec, params, stats, body, q, inputs.positions


def decoded(spec: str, tokens: Sequences, added: np.ndarray) -> np.ndarray:
    codec, params, stats, body, _, _ = coded(spec, tokens, added)
    return np.asarray(codec.dequantize(params, stats, body))


def changed(first: np.ndarray, second: np.ndarray) -> float:
    """Share of entries that were decoded from another code: rounding moves an entry, and its scale,
    by less."""
    return float(np.mean(np.abs(first - second) > 1e-3 * np.maximum(np.abs(first), 1)))


@pytest.mark.parametrize("spec", some(SPECS, SPECS[:3]))
def test_codes_do_not_depend_on_the_bias_and_without_the_option_they_do(spec: str):
    tokens, zero = sequences(), np.zeros((HEADS, WIDTH), np.float32)
    larger = with_constant(tokens, constant())
    before, after = (
        decoded(f"{spec},subtract_bias=true", tokens, zero),
        decoded(f"{spec},subtract_bias=true", larger, constant()),
    )
    assert changed(before, after) <= 1e-3, (
        f"{changed(before, after):.2%} of the entries have other codes"
    )
    plain, disturbed = decoded(spec, tokens, zero), decoded(spec, larger, zero)
    others = np.setdiff1d(np.arange(WIDTH), np.flatnonzero(constant()[0]))
    if spec.startswith(("int", "nf", "innerq")):
        error = changed(plain[..., others], disturbed[..., others])
        assert error > 0.2, (
            f"the constant disturbs only {error:.2%} of the channels without it: no control"
        )
    else:
        assert changed(plain, disturbed) > 0.02, "the constant disturbs nothing: no control"


@pytest.mark.parametrize("spec", some(SPECS, SPECS[::3]))
def test_scores_are_those_of_the_restored_keys_and_grow_by_the_biass_share(spec: str):
    spec, zero = f"{spec},subtract_bias=true", np.zeros((HEADS, WIDTH), np.float32)
    tokens, found, rows = yarn(sequences()), [], []
    for sequence, added in ((tokens, zero), (with_constant(tokens, constant()), constant())):
        codec, params, stats, body, q, positions = coded(spec, sequence, added)
        scores = codec.scores(
            params, stats, codec.query(params, stats, q), body, positions, tokens.rope
        )
        rows.append(codec.dequantize(params, stats, body))
        keys = codec.vectors(params, rows[-1], positions, tokens.rope)
        scores, wanted = np.asarray(scores), np.asarray(dot_rows(q, keys))
        assert row_errors(scores, wanted).max() < 1e-5, f"{row_errors(scores, wanted).max():.1e}"
        assert row_errors(scores, np.roll(wanted, 1, -1)).max() > 1e-2, (
            "the keys of other positions would pass"
        )
        found.append(scores)
    same = np.all(np.abs(np.asarray(rows[1] - rows[0])) < 5e-3, axis=-1)[
        :, :, None
    ]  # tokens whose codes rounding left alone
    angles = np.asarray(positions, np.float64)[..., None] * np.asarray(
        tokens.rope.inverse_frequencies, np.float64
    )
    turned = rotated(constant()[None, :, None], angles[:, None], 1.25)
    share = np.einsum("bkrh,bkch->bkrc", q, turned)
    error = np.where(same, np.abs(found[1] - found[0] - share), 0).max() / np.abs(share).max()
    assert same.mean() > 0.9, "too few tokens kept their codes"
    assert error < 1e-4, f"{error:.1e} of the largest share"
    assert np.abs(np.roll(share, 1, -1) - share).max() / np.abs(share).max() > 0.1, (
        "another position's share would pass"
    )


def test_the_wrapped_codec_stores_what_the_plain_one_does_and_no_kernel_reads_it():
    plain, wrapped = (
        kvq.cache.layout(spec, DIMS, 1, 64).plans[0] for spec in ("int4", "int4:subtract_bias=true")
    )
    assert isinstance(wrapped.k, BiasSubtracting)
    assert wrapped.k.inner == plain.k
    assert wrapped.v == plain.v
    assert wrapped.layout(2, "bfloat16") == plain.layout(2, "bfloat16")
    assert "subtract_bias=true adds" in str(dispatch.unsupported(wrapped, 4, 1))


def test_what_is_missing_is_named():
    codec = empty("int4:subtract_bias=true")[0].k
    inputs = sequences().window(np.zeros(8, np.int32), np.full(8, 8, np.int32), 8)
    with pytest.raises(
        ValueError,
        match=r"\Asubtract_bias=true needs the biases of key projections: kvq.parameters[^\n]+\Z",
    ):
        codec.rows((), inputs)
    weights = layer_weights(HEADS, WIDTH, key_bias(HEADS * WIDTH))
    with pytest.raises(ValueError, match=r"\Asubtract_bias=true needs the model's rope, [^\n]+\Z"):
        codec.rows(codec.learning.from_weights(weights), dataclasses.replace(inputs, rope=None))
    with pytest.raises(ValueError, match=r"\Asubtract_bias=true: [^\n]+ has no bias; [^\n]+\Z"):
        check_bias(layer_weights(HEADS, WIDTH))
    with pytest.raises(ValueError, match=r"\Asubtract_bias=true: [^\n]+QK-norm[^\n]+\Z"):
        check_bias(dataclasses.replace(weights, k_norm=jnp.ones(WIDTH)))
