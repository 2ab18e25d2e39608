"""Gemma 3 as its GGUF file has it, with random weights: a windowed layer below a global one, and
SentencePiece's tokens. It is evaluated, planned for and served."""

import argparse
import pathlib

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import load_llama
from kvq_models.inference.engine.engine import Engine
from kvq_models.llama.open_checkpoint import read_config
from kvq_tools.cli import planned
from kvq_tools.cli.commands import plan
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import write_gguf
from tests.kvq_tools.serving.running import serving

WINDOW = 160  # of the layers but every sixth
PIECES = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁t", "▁the"]
VOCABULARY = {
    "model": "llama",
    "tokens": PIECES,
    "scores": [-float(i) for i in range(len(PIECES))],
    "token_type": [2, 3, 3, *[6] * 256, 1, 1, 1],
    "add_bos_token": True,
    "add_space_prefix": False,
    "unknown_token_id": 0,
}
TEXT = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 640)))
CACHES = ("dense", "kivi:bits=4", "kivi:bits=2")


def windowed(cache: str) -> str:
    """Return a cache whose windows leave most of a layer's tokens to its codes."""
    return f"{cache}{',' if ':' in cache else ':'}sink=0,recent=16,block=16"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a file of six layers, of which the last has no window, with the text beside it."""
    folder = tmp_path_factory.mktemp("gemma")
    config = tiny_config(
        "gemma3_text",
        vocab_size=len(PIECES),
        num_hidden_layers=6,
        sliding_window=WINDOW,
        sliding_window_pattern=6,
        max_position_embeddings=640,
        head_dim=32,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
    )
    (folder / "text").write_text(TEXT)
    path = folder / "gemma.gguf"
    return write_gguf(
        random_llama(config), path, architecture="gemma3", kind="Q8_0", tokenizer=VOCABULARY
    )


def test_caches_of_a_file_are_compared_beyond_its_windows(gemma: pathlib.Path, run_json):
    caches = [part for cache in CACHES for part in ("--cache", windowed(cache))]
    size = ("--window", 2 * WINDOW, "--stride", 32, "--limit", 2 * WINDOW)
    found = run_json("eval", gemma, "--text", gemma.parent / "text", *size, *caches)
    kl = {cache: one["kl"] for cache, one in zip(CACHES, found["caches"], strict=True)}
    assert kl["dense"] < 1e-6 < kl["kivi:bits=4"] < kl["kivi:bits=2"]
    assert all(np.isfinite(list(kl.values())))


def test_a_plan_gives_windowed_layers_bits_of_their_own(
    gemma: pathlib.Path, run_json, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plan, "LENGTH", 64)
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path))
    fast = ("--fast", "--text", gemma.parent / "text")
    found = run_json("plan", gemma, *fast, "--budget", "2.5bits", "--context", 640)
    (cache,) = (cache for cache in found["caches"] if cache["bits"] == 2.5)
    spec, config = kvq.parse(cache["name"]), read_config(gemma)
    bits = [sum(sum(spec.k.widths(side, i, config)) for side in "kv") for i in range(6)]
    assert min(bits[:5]) > bits[5], "the layer without a window keeps more tokens"
    assert cache["body_bits_per_element"] <= 2.5

    def automatic(**tokens: int) -> str:
        command = dict(command="generate", model=str(gemma), cache="auto:bits=2.5")
        planned.resolve(options := argparse.Namespace(**command, **tokens))
        return str(options.cache.spec)

    fewer = run_json("plan", gemma, "--budget", "2.5bits", "--context", 320)["chosen"]
    assert automatic(capacity=320) == automatic(context=320) == fewer != found["chosen"]
    assert automatic() == automatic(capacity=None) == found["chosen"], "the model's positions"


def test_a_file_is_served(gemma: pathlib.Path):
    llama, tokenizer = load_llama(gemma, dtype="float32")
    engine = Engine(llama, windowed("kivi:bits=4"), slots=1, capacity=256, widths=(64,))
    engine.warm_up()
    with serving(engine, tokenizer) as server:
        fields = {"prompt": TEXT[:200], "max_tokens": 8, "logit_bias": {"2": -100}}  # no <eos>
        answer = server.client.completions.create(model="small", temperature=0, **fields)
    assert answer.usage.prompt_tokens == 201  # with <bos>
    assert answer.usage.completion_tokens == 8
