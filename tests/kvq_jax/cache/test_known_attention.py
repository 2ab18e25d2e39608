"""The attention of a model's layers is read from its config, and a config whose attention a cache
would not compute is refused by the name of its field."""

import pytest
import transformers

import kvq_jax as kvq
from kvq_jax.layer.attention import Attention
from tests.kvq_models.checkpoints import tiny_config

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
}
REFUSED = {
    "Gemma3TextConfig": ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "Gemma3nTextConfig": ({}, "model_type='gemma3n_text'"),
    "DeepseekV3Config": ({}, "kv_lora_rank=512"),
    "Llama4TextConfig": ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    "LlamaConfig": ({"alibi": True}, "alibi=True"),
    "BitNetConfig": ({"sliding_window": 64}, "sliding_window=64 does not say which layers"),
    "Qwen3Config": ({"layer_types": ["full_attention"] * 3}, "3 entries for 2 layers"),
    "DiffLlamaConfig": ({}, "model_type='diffllama' has the difference of two softmaxes"),
    "DogeConfig": ({}, "model_type='doge' has a mask that is computed"),
    "JetMoeConfig": ({}, "model_type='jetmoe' has query heads that read KV heads in another order"),
    "MllamaTextConfig": ({}, "model_type='mllama_text_model' has layers that attend to images"),
    "EuroBertConfig": ({}, "model_type='eurobert' has tokens that see later ones"),
}
WINDOW, GLOBAL = Attention(window=64), Attention()
KINDS = ["sliding_attention", "full_attention"]
READ = {
    "LlamaConfig": ({}, ()),
    "Qwen3Config": ({}, ()),
    "Qwen2Config": (
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
        (GLOBAL, WINDOW),
    ),
    "Qwen2Config, unused": ({"sliding_window": 64, "use_sliding_window": False}, ()),
    "MistralConfig": ({"sliding_window": 64}, (WINDOW, WINDOW)),
    "Phi3Config": ({"sliding_window": 64}, (WINDOW, WINDOW)),
    "Gemma2Config": (
        {"sliding_window": 64, "layer_types": KINDS},
        (Attention(64, 0.0625, 50.0), Attention(None, 0.0625, 50.0)),
    ),
    "Gemma3TextConfig": (
        {"query_pre_attn_scalar": 32, "sliding_window": 64, "layer_types": KINDS},
        (WINDOW, GLOBAL),
    ),
    "GptOssConfig": ({}, (Attention(128, sinks=True), Attention(sinks=True))),
    "GraniteConfig": ({"attention_multiplier": 0.5}, (Attention(scale=0.5),) * 2),
    "GraniteConfig, plain": ({"attention_multiplier": 32**-0.5}, ()),
    "CohereConfig": ({}, ()),
    "DiaDecoderConfig": ({}, (Attention(scale=1.0),) * 2),
}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("minimax_m3_vl", "model_type='minimax_m3_vl_text' has attention over chosen blocks"),
        ("diffusion_gemma", "model_type='diffusion_gemma_text' has tokens that see later ones"),
        ("t5gemma2_decoder", "has one softmax over its own tokens and the encoder's"),
        ("dory", "has layers that run several times"),
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_the_attention_of_new_families_is_refused_by_name(name, reason):
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {name}")
    config = transformers.CONFIG_MAPPING[name]().get_text_config()
    with pytest.raises(NotImplementedError, match=reason):
        kvq.init_cache("kivi:bits=4", config, 1, 128)


@pytest.mark.usefixtures("types_unchecked")
def test_layers_with_query_heads_of_their_own_are_refused():
    config = config_of("LlamaConfig", {"num_attention_heads_per_layer": [4, 8]})
    with pytest.raises(NotImplementedError, match="num_attention_heads_per_layer has 4 and 8 qu"):
        kvq.init_cache("kivi:bits=4", config, 1, 128)
    config.num_attention_heads_per_layer = [4, 4]
    assert kvq.init_cache("kivi:bits=4", config, 1, 128).dims.attention == ()


def config_of(name, fields):
    return getattr(transformers, name)(**SIZES, **fields)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused_by_name(name):
    fields, reason = REFUSED[name]
    config = config_of(name, fields) if "3 entries" not in reason else config_of(name, {})
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(NotImplementedError) as caught:
        kvq.init_cache("kivi:bits=4", config, 1, 128)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("name", READ)
def test_attention_is_read_from_configs(name):
    fields, attention = READ[name]
    cache = kvq.init_cache("kivi:bits=4", config_of(name.partition(",")[0], fields), 1, 256)
    assert cache.dims.attention == attention
    assert tuple(plan.attention for plan in cache.plans) == (attention or (GLOBAL,) * 2)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    "name", ["Qwen2Config", "MixtralConfig", "GraniteConfig", "Starcoder2Config"]
)
def test_heads_share_the_width_if_a_config_gives_no_head_dim(name):
    sizes = {field: size for field, size in SIZES.items() if field != "head_dim"}
    config = getattr(transformers, name)(**sizes | {"hidden_size": 256})
    assert getattr(config, "head_dim", None) is None, "it would be read"
    assert kvq.init_cache("kivi:bits=4", config, 1, 64).dims.head_dim == 64


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (SIZES, "a config of type dict has no num_hidden_layers"),
        (transformers.GPT2Config(), "a config of type GPT2Config has no num_key_value_heads"),
    ],
)
def test_a_config_without_a_dimension_is_refused_with_what_to_pass(config, missing):
    with pytest.raises(ValueError, match=f"{missing}: pass kvq.CacheDims"):
        kvq.init_cache("kivi:bits=4", config, 1, 64)


def test_dimensions_alone_have_plain_attention():
    dims = kvq.CacheDims(2, 4, 2, 32, 128)
    assert kvq.init_cache("kivi:bits=4", dims, 1, 128).plans[0].attention == Attention()


def test_a_config_of_kvq_models_says_what_its_attention_is():
    windowed = tiny_config("mistral", sliding_window=32)
    cache = kvq.init_cache("kivi:bits=4", windowed, 1, 64, "float32")
    assert cache.dims.attention == (Attention(window=32),) * windowed.num_hidden_layers
    assert kvq.init_cache("kivi:bits=4", tiny_config(), 1, 64, "float32").dims.attention == ()
