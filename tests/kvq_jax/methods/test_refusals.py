"""One table over all methods: options that fit no cache, or not this model, are refused in one line
that says what is wrong and what is allowed."""

import re

import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims

TINY, SMALL = CacheDims(1, 4, 2, 32, 128), CacheDims(4, 4, 2, 64, 256)
LLAMA_2_7B, LLAMA_3_8B = CacheDims(32, 32, 32, 128, 4096), CacheDims(32, 32, 8, 128, 4096)
# (spec, model, expressions that all match the message)
REFUSED = [
    # values of layers
    ("waterfill:k_widths=-4@0/44", SMALL, r"\Awaterfill:k_widths=-4@0/44 must be not negative"),
    ("block_gtq:k_widths=44@1/-4", SMALL, r"\Ablock_gtq:k_widths=44@1/-4 must be not negative"),
    # groups and blocks
    (
        "kivi:group_size=48,block=48",
        SMALL,
        "group_size=48",
        r"head_dim \(64\)",
        "1, 2, 4, 8, 16, 32, 64",
    ),
    ("innerq:group_size=16,block=24", SMALL, "group_size=16", r"block of tokens \(24\)"),
    ("innerq:mode=sym,storage=slot", SMALL, "storage=slot is for hybrid groups", "mode=sym"),
    (
        "k=dense+v=innerq:group_size=64,storage=slot+cache:block=64",
        SMALL,
        "storage=slot has 32 bits",
        "group_size=64",
    ),
    ("int4:group_size=24", TINY, "KV width of 2 heads of 32; sizes: 1, 2, 4, 8, 16, 32, 64"),
    # layers
    ("kivi:skip_layers=4", SMALL, "layer 4", "0 to 3"),
    ("kivi:bits=8@50-60/2", SMALL, "kivi:bits", "layer 60", "0 to 3"),
    ("k=dense+v=innerq:bits=3@0/3@2-4/2", SMALL, "innerq:bits", "layer 4", "0 to 3"),
    # biases and rotations
    (
        "dense:subtract_bias=true",
        SMALL,
        "subtract_bias=true",
        "dense",
        "keeps keys in full precision",
    ),
    ("xquant:subtract_bias=true", SMALL, "subtract_bias=true", "xquant", "caches no keys"),
    (
        "k=dense+v=kivi+cache:subtract_bias=true",
        SMALL,
        "subtract_bias=true",
        "keeps keys in full precision",
    ),
    (
        "zipcache:subtract_bias=true",
        TINY,
        r"\Asubtract_bias=true has no meaning for keys of zipcache, which share a row with values",
    ),
    ("dense:rotate=true", SMALL, r"\Aunknown option 'rotate' of dense"),
    ("xquant:rotate=true", SMALL, r"\Aunknown option 'rotate' of xquant"),
    ("polarquant:rotate=true", SMALL, r"\Aunknown option 'rotate' of polarquant"),
    ("squat:ahead=16,rotate=true", SMALL, r"\Aahead=16 turns queries by RoPE"),
    # outliers
    (
        "gear",
        CacheDims(1, 512, 512, 128, 4096),
        "512 heads of 128 channels do not fit 16-bit counts",
    ),
    (
        "gear:backbone=kcvt,group_size=32",
        TINY,
        r"\Agroup_size=32 has no meaning with backbone=kcvt",
    ),
    ("gear:outliers=0.7", TINY, r"\Aoutliers=0\.7 must be 0, or a fraction below 0\.5"),
    ("gear:rank=40", TINY, r"\Arank=40 must not be above the block \(64\) or head_dim \(32\)"),
    ("gear:turns=0", TINY, r"\Aturns=0 finds no approximation"),
    ("gear:group_size=2,block=2", TINY, r"\Aoutliers=0\.02 leaves nothing of 2 entries"),
    ("kvquant:outliers=0.7", TINY, r"must be 0, or a fraction below 0\.5"),
    ("kvquant:outliers=-0.1", TINY, r"outliers=-0\.1 must be finite and not negative"),
    ("kvquant:outliers=some", TINY, "cannot be read; expected float"),
    ("kvquant:slots=0", TINY, "slots=0 leaves no place for outliers: outliers=0 turns them off"),
    ("kvquant:qnorm=true,datatype=nf", TINY, "qnorm=true needs datatype=nuq"),
    ("kvquant:bits=8", TINY, "choose from 2, 3, 4"),
    (
        "kvquant:channel_ranges=prompt,thresholds=matrix,outliers=0.1",
        SMALL,
        "channel_ranges=prompt needs thresholds=vector",
    ),
    # head dims
    ("polarquant", CacheDims(1, 4, 2, 33, 132), r"\Ahead_dim 33 has no pairs"),
    # subspaces
    (
        "squat:preset=gpt",
        TINY,
        "preset=gpt",
        "lm-eval, llama-2-7b-longbench, llama-3.1-8b-longbench, mistral-7b-v0.3-longbench",
    ),
    ("kivi:preset=lm-eval", TINY, "'preset'", "kivi"),
    ("squat:presets=lm-eval", TINY, "'presets'", "preset, sink"),
    ("squat:bits=8", TINY, "bits=8", "2, 3, 4"),
    ("squat:rank=0", TINY, "rank=0", r"head_dim \(32\)"),
    ("squat:rank=33", TINY, "rank=33", r"head_dim \(32\)"),
    ("squat:lam=-1", TINY, "lam=-1"),
    ("squat:lam=nan", TINY, "lam=nan"),
    ("squat:ahead=-1", TINY, "ahead=-1"),
    ("squat_pre:ahead=8", TINY, "'ahead'", "queries"),
    ("squat:block_channels=32", TINY, "block_channels=32", "head_dim 32", "kivi"),
    # widths
    ("waterfill:bits=0.3", TINY, r"bits=0\.3", "32 channels", "between"),
    ("waterfill:bits=9", TINY, "bits=9", "between"),
    ("block_gtq:bits=0.5", TINY, r"bits=0\.5", "between 1 and 8"),
    ("k=dense+v=block_gtq:bits=0.5", TINY, r"bits=0\.5", "between 1 and 8"),
    ("k=dense+v=block_gtq:bits=20", TINY, "bits=20", "between 1 and 8"),
    ("waterfill:k_widths=1234", TINY, "k_widths=1234", "widest first"),
    ("waterfill:v_widths=9100", TINY, "v_widths=9100", "at most 8 bits"),
    ("waterfill:v_widths=221", TINY, "v_widths=221", "3 chunks", "RoPE pairs"),
    # one body for keys and values, layers that build on each other
    ("k=xquant+v=kivi", LLAMA_2_7B, "keeps one body for keys and values"),
    ("k=dense+v=xquant_cl:base_layer=0", LLAMA_3_8B, "keeps one body for keys and values"),
    (
        "xquant_cl:skip_layers=5",
        LLAMA_3_8B,
        "skip_layers names layer 5: layers in full precision must lie before layer 2",
    ),
    ("xquant_cl:base_layer=40", LLAMA_3_8B, "starts at layer 40, but the model has layers 0 to 31"),
    ("k=xquant:bits=4+v=xquant:bits=2", LLAMA_2_7B, "keeps one body for keys and values"),
    ("xquant:exact_outlier_channel=true", LLAMA_2_7B, "about latents of keys"),
    ("xquant_cl:reading=residual_stream,latent=true", LLAMA_3_8B, "needs latent=false"),
    ("xquant:group_size=96,latent=false", LLAMA_3_8B, "group_size=96 does not divide the row"),
    ("k=zipcache+v=kivi", TINY, r"\A'k=zipcache\+v=kivi.*use it for both"),
    ("zipcache:block=20", TINY, r"\Ablock=20 must be a multiple of 8"),
    ("zipcache:unimportant_ratio=1", TINY, r"\Aunimportant_ratio=1 leaves one kind of tokens"),
    ("zipcache:probes=0", TINY, r"\Aprobes=0 tells nothing"),
]


@pytest.mark.parametrize(("spec", "dims", "parts"), [(s, d, p) for s, d, *p in REFUSED])
def test_options_that_fit_no_cache_are_refused_in_one_line(
    spec: str, dims: CacheDims, parts: list[str]
):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        kvq.cache.layout(spec, dims, 1, 256)
    for part in parts:
        assert re.search(part, str(error.value)), str(error.value)
