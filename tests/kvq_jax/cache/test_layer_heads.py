"""Layers with KV heads and a head dim of their own, as in Gemma 4: every layer is that of a model
whose layers are all like it."""

import dataclasses

import jax
import numpy as np
import pytest
import transformers

import kvq_jax as kvq
from kvq_jax.cache.dims import LayerHeads
from kvq_jax.layer.attention import Attention
from tests.kvq_jax.layer_runs import layer_weights

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


CALIBRATED = ("waterfill:bits=3", "kvquant:bits=3,outliers=0.05", "xquant:bits=4", "oscar_spectral")


@pytest.mark.parametrize("spec", CALIBRATED)
def test_parameters_of_a_layer_are_those_of_a_model_of_its_own(spec: str):
    made = []
    for layer, (kv_heads, head_dim) in enumerate(HEADS):
        learned = {side: np.asarray(rows(layer, 24)[side]) for side in "kv"}
        weights = layer_weights(kv_heads, head_dim)
        per_model = []
        for dims in (OWN, OWN.at(layer)):
            dims = dataclasses.replace(dims, hidden_size=weights.k_kernel.shape[0])
            fitted = kvq.parameters.calibrate(spec, dims, layer, learned, learned)
            per_model.append(
                kvq.parameters.prepare(spec, dims, layer, weights=weights, calibrated=fitted)
            )
        jax.tree.map(np.testing.assert_array_equal, *per_model)
        made.append(per_model[0])
    shapes = [jax.tree.map(np.shape, layer) for layer in made]
    assert shapes[0] != shapes[1]


def test_fitted_widths_spend_the_bits_of_each_head_dim():
    sizes = (32, 128, 32, 128)
    dims = dataclasses.replace(
        OWN, num_hidden_layers=4, layer_heads=tuple(LayerHeads(2, size) for size in sizes)
    )
    energies = {
        side: [
            {"energies": np.exp(-np.arange(size // (2 if side == "k" else 1)) / (5 + layer))[None]}
            for layer, size in enumerate(sizes)
        ]
        for side in "kv"
    }
    method = kvq.parse("waterfill:bits=2.5").k
    fitted = method.fitted(energies, dims)
    for layer, size in enumerate(sizes):
        alone = {side: [layers[layer]] for side, layers in energies.items()}
        own = method.fitted(alone, dataclasses.replace(dims.at(layer), num_hidden_layers=1))
        for side in "kv":
            assert fitted.widths(side, layer, dims) == own.widths(side, 0, dims.at(layer))
        both = sum(sum(fitted.widths(side, layer, dims)) for side in "kv")
        chunks = len(fitted.widths("k", layer, dims))
        assert 2.4 < both / (2 * chunks) + 8 / size <= 2.5 + 1e-6, layer
    spec = dataclasses.replace(kvq.parse("waterfill"), k=fitted, v=fitted)
    assert kvq.cache.layout(spec, dims, 1, 512).plans[1].k.format.channels == 128


def test_fitted_widths_of_block_gtq_fit_the_head_dim_of_each_layer():
    sizes = (64, 32)
    dims = dataclasses.replace(
        OWN, num_hidden_layers=2, layer_heads=tuple(LayerHeads(2, size) for size in sizes)
    )
    energies = [{"energies": np.geomspace(9, 0.1, size // 2)[None]} for size in sizes]
    spec = kvq.parse("block_gtq")
    fitted = dataclasses.replace(spec, k=spec.k.fitted({"k": energies}, dims))
    for size, plan in zip(sizes, kvq.cache.layout(fitted, dims, 1, 64).plans, strict=True):
        widths = plan.k.format.widths
        assert (len(widths), sum(widths)) == (size // 4, 3 * size // 4)


def test_rows_of_another_layer_are_refused_with_the_shape_of_this_one():
    other = {side: rows(0, 24)[side] for side in "kv"}
    with pytest.raises(ValueError, match=r"rows\[.k.\] must be \[B, 1, T, 128\]"):
        kvq.parameters.calibrate(CALIBRATED[0], OWN, 1, other, other)
