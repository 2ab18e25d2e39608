"""Families that compute something else than Llama, through caches: a ragged prompt and steps equal
the exact model, also for keys that are rotated as they are read, and what a family's layers cannot
offer a method is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import decode_step, forward, prefill, prepare
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import abstract_llama
from kvq_models.llama.weight_count import weight_count
from kvq_models.llama.weights_needed import check_weights
from tests.exhaustive import some
from tests.kvq_models.checkpoints import CASES, SIZES, random_llama, random_tokens, row_errors

LENGTHS, LENGTH = (40, 23), 48
FAMILIES = (
    "granite",
    "smollm3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "mistral_window",
    "ministral3",
    "gemma2",
    "gemma3",
    "olmo3",
    "phi3_partial",
    "gpt_oss",
)
OTHERS = r"cannot express|not supported|entries for 8 pairs|does not read"
CONTROLLED = ("mixtral", "mistral_window", "gpt_oss")  # also read through a coarse cache
# another order of norms, layers without RoPE, queries that grow, caps, sinks with windows and
# experts, part of a head
USUAL = "olmo2", "smollm3", "ministral3", "gemma2", "gpt_oss", "phi3_partial"
step = jax.jit(decode_step, donate_argnames="cache")


def config_of(family: str) -> LlamaConfig:
    case = CASES[family]
    fields = {"model_type": case.model_type, "rope_parameters": case.rope}
    return LlamaConfig.from_hf(SIZES | fields | case.fields)


def continued(llama, spec: str) -> tuple[list[np.ndarray], jax.Array]:
    """Return the logits of each row from its last prompt token on, and the tokens."""
    tokens = random_tokens((2, LENGTH))
    cache = kvq.init_cache(spec, llama.config, 2, LENGTH + 16, "float32")
    logits, cache = prefill(llama, cache, tokens[:, : max(LENGTHS)], LENGTHS)
    rows = [[np.asarray(logits[b])] for b in range(2)]
    for i in range(LENGTH - max(LENGTHS)):
        now = jnp.stack([tokens[b, length + i] for b, length in enumerate(LENGTHS)])
        logits, cache = step(llama, cache, now)
        for b in range(2):
            rows[b].append(np.asarray(logits[b]))
    return [np.stack(row) for row in rows], tokens


def worst_error(llama, spec: str) -> float:
    rows, tokens = continued(llama, spec)
    exact = np.asarray(forward(llama, tokens))
    return max(
        row_errors(row, exact[b, length - 1 : length - 1 + len(row)]).max()
        for b, (row, length) in enumerate(zip(rows, LENGTHS, strict=True))
    )


@pytest.mark.parametrize("family", some(FAMILIES, USUAL))
def test_a_ragged_batch_continues_as_the_exact_model(family: str):
    llama = random_llama(config_of(family))
    assert worst_error(llama, "dense") < 1e-5
    if family in CONTROLLED:
        coarse = worst_error(llama, "kivi:bits=2,sink=0,recent=0,block=8")
        assert coarse > 1e-3, "quantization is not seen"


def test_keys_of_layers_without_rope_are_not_rotated_as_they_are_read():
    """xquant keeps inputs of layers and rotates keys as it reads them."""
    llama = random_llama(config_of("smollm3"))
    spec = "xquant:bits=8,group_size=8,recent=8,block=8"
    assert worst_error(prepare(llama, spec), spec) < 0.05
    for layer in llama.layers:
        assert layer.rotated != (layer is llama.layers[0])
    rotated = dataclasses.replace(llama.config, unrotated_layers=())
    other = random_llama(rotated)
    assert (
        row_errors(
            forward(other, random_tokens((1, 24))), forward(llama, random_tokens((1, 24)))
        ).max()
        > 0.05
    ), "the rotation of a layer changes nothing"


@pytest.mark.parametrize("spec", ["xquant:bits=4", "kivi:bits=4,subtract_bias=true"])
def test_methods_that_build_on_weights_are_refused_for_norms_of_outputs(spec: str):
    with pytest.raises(ValueError, match=r"olmo2 uses in another order.*kivi:bits=4"):
        check_weights(kvq.parse(spec), config_of("olmo2"))
    check_weights(kvq.parse("kivi:bits=4"), config_of("olmo2"))


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "mistral_window"])
def test_configs_are_written_as_they_were_read(family: str):
    config = config_of(family)
    assert LlamaConfig.from_hf(config.to_hf()) == config
    with pytest.raises((ValueError, NotImplementedError), match=OTHERS):
        dataclasses.replace(config, model_type="llama").to_hf()


@pytest.mark.parametrize("family", CASES)  # some with heads of their own, others without
def test_weights_are_counted_from_the_configuration(family: str):
    config = config_of(family)
    weights = jax.tree.leaves(abstract_llama(config))
    assert weight_count(config) == sum(weight.size for weight in weights)


def test_few_and_many_tokens_take_the_same_experts():
    layer = random_llama(config_of("mixtral")).layers[0]
    rows = jax.random.normal(jax.random.key(0), (1, 12, SIZES["hidden_size"]))
    together, experts = np.asarray(layer.mlp(rows)), layer.mlp.config
    alone = np.concatenate([layer.mlp(rows[:, i : i + 1]) for i in range(12)], axis=1)
    assert 12 * experts.per_token > experts.count >= experts.per_token, "both ways are taken"
    np.testing.assert_allclose(alone, together, rtol=1e-5, atol=1e-5)
    first = dataclasses.replace(experts, per_token=1)
    layer.mlp.config = first
    assert np.abs(np.asarray(layer.mlp(rows)) - together).max() > 1e-2, "one expert would pass"
