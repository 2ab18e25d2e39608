"""Commands call tokens quantized if the layers of a cache quantize them, whatever the method's
name."""

import pytest

import kvq_jax as kvq
from tests.kvq_models.checkpoints import save_with_tokenizer, tiny_config

TEXT = "one two three four five six seven eight " * 8
NO_LAYER = (
    "no layer of this model quantizes anything, so this is the full-precision model up to rounding"
)

EXACT = [
    "dense",
    "kivi:skip_layers=0-1",
    "xquant:bits=16",
    "xquant:bits=16,latent=true",
    "k=xquant:bits=16,latent=true+v=xquant:bits=16,latent=true",
    "xquant_cl:bits=16,base_layer=1,base_bits=16,early_bits=16",
]
CODED = [
    "kivi",
    "kivi:skip_layers=0",
    "k=kivi+v=dense",
    "xquant",
    "xquant:bits=16@0/4",
    "k=xquant:bits=16,latent=true+v=xquant:bits=4,latent=true",
    "polarquant:angle_bits=4,radius_bits=4",
    "xquant_cl:base_layer=1",
    "k=kivi:bits=4+v=dense+cache:subtract_bias=true",
]


def layout(spec):
    return kvq.cache.layout(spec, tiny_config("qwen2"), 1, 1024)


@pytest.mark.parametrize("spec", EXACT)
def test_a_cache_whose_layers_keep_all_rows_quantizes_no_token(spec):
    assert kvq.size.quantized_tokens(layout(spec), 1024) == 0


@pytest.mark.parametrize("spec", CODED)
def test_a_cache_that_codes_a_side_of_one_layer_quantizes_what_leaves_its_windows(spec):
    cache = layout(spec)
    assert not cache.spec.exact
    assert kvq.size.quantized_tokens(cache, 1024) == cache.spec.regions(1024).aged_tokens(1024) > 0
    assert kvq.size.quantized_tokens(cache, cache.spec.sink + cache.spec.recent) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), TEXT)


@pytest.mark.parametrize(
    ("spec", "warning"),
    [
        ("kivi:recent=8,block=8,skip_layers=0", NO_LAYER),
        ("kivi:recent=8,block=8", None),
        ("dense", None),
    ],
)
def test_eval_warns_where_no_layer_quantizes(spec, warning, model, run):
    request = f"eval {model} --text {model / 'text.txt'} --cache {spec}"
    code, _, err = run(f"{request} --window 32 --mode decode")
    assert code == 0, err
    assert [line for line in err.splitlines() if "warning" in line] == (
        [f"kvq: warning: {spec}: {warning}"] if warning else []
    )


def test_dense_rows_have_the_dtype_of_the_model(run_json, model, tmp_path):
    """Rounded rows beside float32 weights would change greedy text."""
    for cache, rows in (("dense", "float32"), ("kivi:bits=2", "bfloat16")):
        made = run_json(
            "prefill", model, "--prompt", TEXT, "--cache", cache, "--out", tmp_path / "f"
        )
        assert (made["dtype"], made["rows_dtype"]) == ("float32", rows), cache
    shown = run_json("generate", model, "--prompt", TEXT, "--max-new-tokens", 4)
    assert (shown["rows_dtype"], shown["cache_bytes"] // shown["bf16_bytes"]) == ("float32", 2)
