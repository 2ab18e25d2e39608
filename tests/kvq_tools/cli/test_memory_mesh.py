"""`kvq memory --mesh`: the share of each device, from config.json alone."""

import json
import pathlib

import pytest

from tests.kvq_models.checkpoints import tiny_config

MODEL = tiny_config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)


@pytest.fixture
def eight_billion(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf()))
    return tmp_path


def test_ten_million_tokens_fit_eight_devices_quantized_and_not_in_full(
    run_json, eight_billion: pathlib.Path
):
    """KVQuant claims 10M tokens on eight GPUs. Here: an 8B model with 8 KV heads on eight H200s."""
    caches = "--cache kivi:bits=2 --cache kvquant:bits=3 --cache dense"
    found = run_json(f"memory {eight_billion} {caches} --context 10M --mesh auto --devices 8")
    kivi, kvquant, dense = (cache["mesh"] for cache in found["caches"])
    placements = [one["placement"] for one in (kivi, kvquant, dense)]
    assert placements == ["heads=8", "tokens=8", "heads=8"]
    assert [one["fits"] for one in (kivi, kvquant, dense)] == [True, True, False]
    assert 33e9 < kivi["total_bytes"] < 35e9
    assert 40e9 < kvquant["total_bytes"] < 42e9
    assert found["caches"][0]["cache_bytes"] == pytest.approx(
        8 * (kivi["body_bytes"] + kivi["window_bytes"]), rel=1e-4
    )
    assert kivi["weight_bytes"] == pytest.approx(16.06e9 / 8, rel=1e-3), (
        "8.03 billion weights of 2 bytes"
    )
    assert kivi["collectives"] == 1 + 32 * 2, "sums of the embedding, o_proj and down_proj"
    assert kvquant["collectives"] == 1 + 32 * (2 + 2 + 1), (
        "and two merge shards of tokens, and one gathers queries, keys and values"
    )
    for one in (kivi, kvquant):
        assert one["milliseconds"] == pytest.approx(
            1e3 * (one["read_bytes"] / 4.8e12 + one["collectives"] * 10e-6)
        )
