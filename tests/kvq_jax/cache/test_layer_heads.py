"""Layers with KV heads and a head dim of their own, as in Gemma 4: every layer is that of a model
whose layers are all like it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import transformers

import kvq_jax as kvq
from kvq_jax.cache.dims import LayerHeads
from kvq_jax.layer.attention import Attention

HEADS = (LayerHeads(2, 32), LayerHeads(1, 128))
ALIKE = kvq.CacheDims(2, 4, 2, 32, 128)
OWN = dataclasses.replace(ALIKE, layer_heads=HEADS)
GEMMA4 = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
}
SPECS = ("kivi:bits=2,block=16,recent=8", "turboquant:bits=3", "fp8:scale=head", "zipcache", "int4")


def rows(layer: int, tokens: int) -> dict[str, jax.Array]:
    kv_heads, head_dim = HEADS[layer]
    key = jax.random.key(10 * layer + tokens)
    heads = {"q": 4, "k": kv_heads, "v": kv_heads}
    return {
        name: jax.random.normal(jax.random.fold_in(key, i), (2, n, tokens, head_dim))
        for i, (name, n) in enumerate(heads.items())
    }


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_the_sum_of_the_layers(spec: str):
    def layers(dims: kvq.CacheDims) -> list[int]:
        return [kvq.size.nbytes(one) for one in kvq.cache.layout(spec, dims, 1, 512).layers]

    assert layers(OWN) == [layers(OWN.at(i))[i] for i in range(2)]
    assert layers(OWN) != layers(ALIKE)
    assert kvq.size.dense_nbytes(OWN, 1, 512) == 2 * 512 * 2 * (2 * 32 + 128)
    size = kvq.size.of(spec, OWN, 1, 512)
    assert size.elements == 2 * 512 * (2 * 32 + 128)
    assert size.cache == kvq.size.nbytes(kvq.init_cache(spec, OWN, 1, 512, "bfloat16"))


def test_each_layer_is_the_layer_of_a_model_of_its_own(tmp_path):
    spec = SPECS[0]
    cache = kvq.init_cache(spec, OWN, 2, 64, "float32")
    alone = [kvq.layer_plan(spec, OWN, layer=i, capacity=64, dtype="float32") for i in range(2)]
    states = [plan.init(2) for plan in alone]
    for tokens, prompt in ((40, True), (1, False)):
        step = kvq.begin(cache, tokens, prefill=prompt)
        for layer in range(2):
            out, step = kvq.append_and_attend(step, **rows(layer, tokens))
            expected, states[layer] = alone[layer].attend(
                states[layer], **rows(layer, tokens), prefill=prompt, layout="BNTH"
            )
            np.testing.assert_array_equal(out, expected)
            assert out.shape == (2, 4, tokens, HEADS[layer].head_dim)
        cache = kvq.finish(step)
    assert not np.array_equal(cache.layers[0].ring[0], cache.layers[1].ring[0])
    kvq.files.save(cache, tmp_path / "cache.safetensors")
    loaded = kvq.files.load(tmp_path / "cache.safetensors", config=OWN)
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    assert kvq.rows.trim(cache, [20, 41]).lengths.tolist() == [20, 41]
    step = kvq.begin(cache, 1, prefill=False)
    with pytest.raises(ValueError, match=r"q must have shape \[2, 4, 1, 32\]"):
        kvq.append_and_attend(step, **rows(1, 1))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((LayerHeads(2, 32),), "1 entries for 2 layers"),
        ((LayerHeads(3, 32),) * 2, "K must divide 4 query heads"),
        ((LayerHeads(2, 0),) * 2, "H be positive"),
    ],
)
def test_heads_that_do_not_fit_are_refused(heads: tuple[LayerHeads, ...], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        kvq.init_cache(SPECS[0], dataclasses.replace(ALIKE, layer_heads=heads), 1, 64)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("types_unchecked")
def test_the_heads_of_a_gemma_4_are_read_from_its_config():
    config = transformers.Gemma4TextConfig(**GEMMA4)
    cache = kvq.init_cache("kivi:bits=4", config, 1, 256)
    assert cache.dims.layer_heads == (*[LayerHeads(2, 32)] * 2, LayerHeads(1, 64))
    windowed = Attention(window=64, scale=1.0)
    assert cache.dims.attention == (windowed, windowed, Attention(scale=1.0))
    assert [plan.head_dim for plan in cache.plans] == [32, 32, 64]
    shared = transformers.Gemma4TextConfig(**GEMMA4 | {"num_kv_shared_layers": 1})
    with pytest.raises(NotImplementedError, match="num_kv_shared_layers=1"):
        kvq.init_cache("kivi:bits=4", shared, 1, 256)


@pytest.mark.usefixtures("types_unchecked")
def test_other_fields_that_differ_by_layer_are_refused_by_name():
    per_layer = {0: {"sliding_window": 32}}
    config = transformers.MistralConfig(num_hidden_layers=2, per_layer_config=per_layer)
    with pytest.raises(NotImplementedError, match="sliding_window differs by layer") as caught:
        kvq.init_cache("kivi:bits=4", config, 1, 64)
    assert "\n" not in str(caught.value)
