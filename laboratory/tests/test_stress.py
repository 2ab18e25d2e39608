"""Stressed models: the dense outputs stay, the cache becomes harder. Refusals are in
test_stress_refusals.py."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import EMBEDDED, load_llama, prefill, prepare, save_llama, score
from kvq_models.llama import hf_names
from kvq_models.llama.model import forward
from kvq_models.llama.rope import rope_for
from laboratory.stress import Outliers, Stress, stressed, widened
from tests.kvq_models.checkpoints import (
    CASES,
    LLAMA3,
    build_checkpoint,
    random_llama,
    random_tokens,
    tiny_config,
    torch_logits,
)

TOLERANCE = 1e-4  # of a logit, whose spread is several units
FAMILIES = {
    "llama": {"num_attention_heads": 8, "hidden_size": 64, "head_dim": 16},
    "qwen2": {},
    "qwen3": {},
    "qwen3 with bias": {"attention_bias": True},
}
KINDS = {
    "keys": Stress(key_outliers=Outliers(2, 12.0)),
    "values": Stress(value_outliers=Outliers(2, 12.0)),
    "bias": Stress(key_bias=50.0),
    "turned keys": Stress(key_outliers=Outliers(2, 12.0), one_dimension=True),
    "inputs": Stress(input_outliers=Outliers(5, 12.0)),
    "all": Stress(
        Outliers(3, 6.0),
        Outliers(1, 6.0),
        50.0,
        seed=3,
        input_outliers=Outliers(2, 6.0),
        one_dimension=True,
    ),
}

CHANGES = [
    (f, k)
    for f in FAMILIES
    for k in KINDS
    if not (f.startswith("qwen3") and k in ("bias", "turned keys"))
]

jitted_forward = jax.jit(forward)


@functools.cache
def plain(family):
    """Return (a random model, its logits)."""
    llama = random_llama(tiny_config(family.split()[0], **FAMILIES[family]))
    return llama, np.asarray(jitted_forward(llama, random_tokens((2, 48))))


def possible(llama, stress):
    """Return the changes without those that the family cannot have."""
    return (
        dataclasses.replace(stress, key_bias=None, one_dimension=False)
        if llama.config.qk_norm
        else stress
    )


def families(test):
    return pytest.mark.parametrize("family", FAMILIES)(test)


def leaves(llama):
    return {path: np.asarray(weight.leaf) for path, weight in hf_names.weights(llama).items()}


def largest_change(llama, logits):
    return float(np.abs(np.asarray(jitted_forward(llama, random_tokens((2, 48)))) - logits).max())


# --- dense outputs stay


@pytest.mark.parametrize(("family", "kind"), CHANGES)
def test_dense_logits_stay_and_the_comparison_sees_what_a_half_done_change_does(family, kind):
    llama, logits = plain(family)
    stress = possible(llama, KINDS[kind])
    harder = stressed(llama, stress)
    change = largest_change(harder, logits)
    assert change < TOLERANCE, f"{kind}: a logit moved by {change:.1e}"
    if kind == "inputs":
        undone = "v_proj.kernel"
    else:
        undone = (
            "o_proj.kernel"
            if stress.value_outliers
            else "q_norm.scale"
            if llama.config.qk_norm
            else "q_proj.kernel"
        )
    old, new, half = leaves(llama), leaves(harder), {}
    for path in (path for path in new if path.endswith(undone)):
        half[path] = jnp.asarray(
            old[path] if new[path].shape == old[path].shape else new[path] / np.float32(1.4)
        )
    control = largest_change(hf_names.replace_weights(harder, half), logits)
    assert control > 100 * TOLERANCE, (
        f"{kind}: the comparison does not see that {undone} was left as it was ({control:.1e})"
    )


def test_a_constant_among_the_old_channels_would_change_the_logits():
    """Heads are widened because of this."""
    llama, logits = plain("llama")
    path, wide = "layers.0.k_proj.bias", stressed(llama, Stress(key_bias=0.0))
    bias = leaves(wide)[path].copy()
    bias[-2] += 5  # an even channel: an old one
    control = largest_change(hf_names.replace_weights(wide, {path: jnp.asarray(bias)}), logits)
    assert control > 100 * TOLERANCE


@families
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_factor_of_one_leaves_every_weight_bitwise_equal_and_another_one_does_not(factor, family):
    llama, _ = plain(family)
    found = leaves(stressed(llama, Stress(Outliers(2, factor), Outliers(3, factor))))
    different = {
        path.split(".", 2)[-1]
        for path, leaf in leaves(llama).items()
        if leaf.tobytes() != found[path].tobytes()
    }
    scaled = (
        {"q_norm.scale", "k_norm.scale"}
        if llama.config.qk_norm
        else {"q_proj.kernel", "k_proj.kernel"}
    )
    biases = {
        f"{name}.bias"
        for name in ("q_proj", "k_proj", "v_proj")
        if not (llama.config.qk_norm and name != "v_proj")
    }
    expected = (
        scaled | {"v_proj.kernel", "o_proj.kernel"} | (biases if llama.config.qkv_bias else set())
    )
    assert different == (expected if factor != 1 else set())


def test_powers_of_two_are_exact_in_bfloat16():
    llama = random_llama(tiny_config(num_attention_heads=8, head_dim=16), dtype=jnp.bfloat16)
    found = leaves(stressed(llama, Stress(Outliers(2, 16.0), Outliers(2, 16.0))))
    for path, leaf in leaves(llama).items():
        ratio = found[path].astype(np.float32) / leaf.astype(np.float32)
        assert set(np.unique(ratio)) <= {1 / 16, 1.0, 16.0}, path


def test_the_written_checkpoint_gives_transformers_the_logits_of_the_old_one(tmp_path):
    pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers import AutoModelForCausalLM

    tokens = random_tokens((2, 40))
    for name in ("qwen2_tied_gqa7", "mistral"):
        want = torch_logits(build_checkpoint(tmp_path / name, CASES[name]), tokens)
        llama, _ = load_llama(tmp_path / name, dtype="float32")
        save_llama(stressed(llama, possible(llama, KINDS["all"])), tmp_path / f"{name} harder")
        got = torch_logits(
            AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} harder"), tokens
        )
        assert np.abs(got - want).max() < TOLERANCE, (
            f"{name}: a logit moved by {np.abs(got - want).max():.1e}"
        )


# --- channels


def test_outliers_are_whole_pairs_of_the_keys_and_channels_of_the_values_in_every_head_and_layer():
    llama = random_llama(tiny_config(num_attention_heads=8, head_dim=16))
    found = leaves(stressed(llama, Stress(Outliers(3, 4.0), Outliers(5, 8.0))))
    drawn = set()
    for layer in range(2):
        ratio = {
            name: found[path] / leaves(llama)[path]
            for name in "kv"
            for path in (f"layers.{layer}.{name}_proj.kernel",)
        }
        keys, values = (ratio[name].reshape(-1, 2, 16) for name in "kv")
        assert (keys[..., :8] == keys[..., 8:]).all(), (
            f"layer {layer}: the two channels of a pair differ"
        )
        assert ((keys[0] == 4).sum(-1) == 6).all(), f"layer {layer}: {keys[0]}"
        assert ((values[0] == 8).sum(-1) == 5).all(), f"layer {layer}: {values[0]}"
        drawn |= {head.tobytes() for head in (*keys[0], *values[0])}
    assert len(drawn) == 8, "two heads have the same draws"


def test_the_seed_decides_and_kinds_do_not_disturb_each_other():
    llama = random_llama(tiny_config(num_attention_heads=8, head_dim=16))
    keys = Stress(key_outliers=Outliers(2, 4.0))
    alone, again = (leaves(stressed(llama, keys))["layers.1.k_proj.kernel"] for _ in range(2))
    both = leaves(stressed(llama, Stress(Outliers(2, 4.0), Outliers(2, 4.0))))[
        "layers.1.k_proj.kernel"
    ]
    other = leaves(stressed(llama, Stress(key_outliers=Outliers(2, 4.0), seed=1)))[
        "layers.1.k_proj.kernel"
    ]
    assert alone.tobytes() == again.tobytes() == both.tobytes() != other.tobytes()


def test_a_key_bias_stands_where_queries_are_zero_at_frequencies_between_the_old_ones():
    config = tiny_config(head_dim=32, rope_scaling=LLAMA3, rope_theta=1e4)
    harder = stressed(random_llama(config), Stress(key_bias=50.0))
    found = leaves(harder)
    for layer in range(2):
        bias = found[f"layers.{layer}.k_proj.bias"].reshape(2, 64)
        assert (np.abs(bias[:, [1, 17, 33, 49]]) == 50).all(), "channels 1, 17 and their partners"
        assert (bias[:, ::2] == 0).all(), "an old channel has a constant"
        queries = found[f"layers.{layer}.q_proj.kernel"].reshape(-1, 4, 64)
        assert (queries[..., 1::2] == 0).all()
        assert (queries[..., ::2] != 0).all()
    before, after = (rope_for(c, 64).inverse_frequencies for c in (config, harder.config))
    np.testing.assert_allclose(after[::2], before, rtol=1e-6)


# --- a harder cache


def cache_error(llama, spec):
    """Mean |change of a log-probability| by a cache, read through it; the first half is
    prefilled."""
    tokens, found = random_tokens((2, 64)), []
    for one in ("dense", spec):
        cache = kvq.init_cache(one, llama.config, 2, 64, "float32")
        prepared = prepare(llama, one)
        _, cache = prefill(prepared, cache, tokens[:, :32])
        found.append(score(prepared, cache, tokens[:, 32:])[0])
    return float(jnp.abs(found[1] - found[0]).mean())


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("keys", "int4:block=8"),
        ("values", "kivi:bits=4,recent=0,block=16,group_size=16"),
        ("inputs", "xquant:bits=4,latent=false,block=8"),
        ("bias", "int4:block=8"),
    ],
)
def test_the_cache_became_harder(kind, spec):
    llama = random_llama(tiny_config(num_attention_heads=8, head_dim=16, num_hidden_layers=1))
    control = stressed(llama, Stress(key_bias=0.0)) if kind == "bias" else llama
    before, after = cache_error(control, spec), cache_error(stressed(llama, KINDS[kind]), spec)
    assert after > 2 * before > 0, f"{spec}: {before:.4f} before, {after:.4f} after"


def test_a_key_bias_does_not_disturb_a_cache_with_a_scale_for_each_channel():
    """Queries do not read the biased pairs, so nothing is said of what it does to its own."""
    llama = random_llama(tiny_config(num_attention_heads=8, head_dim=16, num_hidden_layers=1))
    before, after = (
        cache_error(
            stressed(llama, Stress(key_bias=bias)),
            "k=kivi:bits=4,group_size=16+v=dense+cache:sink=0,recent=0,block=16",
        )
        for bias in (0.0, 50.0)
    )
    assert after == pytest.approx(before, rel=1e-3)


def layer_rows(llama):
    """Return the keys before RoPE and values [1, K, T, H] that layer 0 makes of normalized random
    inputs."""
    weights, config = leaves(llama), llama.config
    x = (
        np.random.default_rng(0).normal(size=(64, config.hidden_size)).astype(np.float32)
        * weights["layers.0.input_norm.scale"]
    )
    rows = [x @ weights[f"layers.0.{name}_proj.kernel"] for name in ("k", "v")]
    return [np.moveaxis(r.reshape(1, 64, config.num_key_value_heads, -1), 1, 2) for r in rows]


def roundtrip_error(before, after, spec):
    """Return the errors of keys and of values through a cache, each entry in units of the rows
    before they were stressed."""
    hats = kvq.roundtrip(spec, *(jnp.asarray(rows) for rows in after), layout="BNTH")
    return [
        np.linalg.norm((hat - rows) * (old / rows)) / np.linalg.norm(old)
        for hat, rows, old in zip(hats, after, before, strict=True)
    ]


PER_CHANNEL, PER_TOKEN, POLAR = (
    "kivi:bits=3,group_size=16,block=16",
    "int3:block=16",
    "polarquant:group_size=16,block=16",
)
K, V = 0, 1


@pytest.mark.parametrize(
    ("kind", "side", "stays", "hurt"),
    [
        ("keys", K, (PER_CHANNEL, POLAR), "int3:block=16"),
        (
            "values",
            V,
            ("innerq:bits=3,group_size=16,block=16",),
            "kivi:bits=3,group_size=16,block=16",
        ),
        ("inputs", K, (PER_CHANNEL, PER_TOKEN, POLAR), None),
    ],
)
def test_outliers_hurt_a_cache_whose_scales_serve_other_entries_beside_them_and_no_other(
    kind, side, stays, hurt
):
    """As the table of docs/evaluation.md says."""
    llama = random_llama(tiny_config(num_attention_heads=8, head_dim=16, num_hidden_layers=1))
    before, after = layer_rows(llama), layer_rows(stressed(llama, KINDS[kind]))
    for spec in stays:
        plain_error, error = (roundtrip_error(before, rows, spec)[side] for rows in (before, after))
        assert error == pytest.approx(plain_error, rel=0.05), spec
        assert plain_error > 0.01
    if hurt:
        plain_error, error = (roundtrip_error(before, rows, hurt)[side] for rows in (before, after))
        assert error > 1.5 * plain_error, hurt


def test_turned_pairs_have_most_of_their_keys_in_the_first_channel():
    llama = random_llama(tiny_config("qwen2", head_dim=16))
    channels = {}
    for kind in ("keys", "turned keys"):
        weights = leaves(stressed(llama, KINDS[kind]))
        scale, kernel, bias = (
            weights[f"layers.1.{name}"]
            for name in ("input_norm.scale", "k_proj.kernel", "k_proj.bias")
        )
        power = ((scale[:, None] * kernel) ** 2).sum(0) + bias**2
        channels[kind] = power.reshape(-1, 2, 8)  # [K, channels of a pair, pairs]
    plain_pairs, pairs = channels.values()
    outliers = np.argsort(pairs.sum(1), axis=-1)[:, -2:]
    first, second = (np.take_along_axis(pairs[:, i], outliers, -1) for i in (0, 1))
    assert (first > second).all()
    np.testing.assert_allclose(pairs.sum(1), plain_pairs.sum(1), rtol=1e-4)
    turned_first = np.take_along_axis(plain_pairs[:, 0], outliers, -1)
    assert (first > turned_first * 1.001).any(), "nothing was turned"
    others = np.ones((len(pairs), 8), bool)
    np.put_along_axis(others, outliers, False, -1)
    np.testing.assert_array_equal(pairs[:, 0][others], plain_pairs[:, 0][others])


# --- what is refused


def test_the_embedded_model_keeps_its_predictions():
    """Trained weights, whose attention is sharp; relative to the largest logit, since sums have
    another order in wider heads."""
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    tokens = np.asarray(
        [
            tokenizer(
                "The pass key is 48213. Remember it. 48213 is the pass key.\nWhat is the pass key?"
            ).input_ids
        ]
    )
    want = np.asarray(jitted_forward(llama, tokens))
    change = (
        np.abs(np.asarray(jitted_forward(stressed(llama, KINDS["all"]), tokens)) - want).max()
        / np.abs(want).max()
    )
    assert change < TOLERANCE / 10, f"relative change {change:.1e}"


def test_wider_heads_keep_a_family_that_has_biases():
    assert widened(tiny_config("qwen2")).model_type == "qwen2"
    assert widened(tiny_config("mistral")).model_type == "llama"
