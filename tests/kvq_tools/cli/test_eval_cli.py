"""`kvq eval` prints the library's numbers, and user errors are one line."""

import importlib
import json

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import load_llama
from kvq_tools import evaluate_caches, tokenize
from kvq_tools.cli import text_input
from laboratory.embedded_model.tokenizer import save_tokenizer, train_tokenizer
from tests.kvq_models.checkpoints import (
    CheckpointCase,
    build_checkpoint,
    save_with_tokenizer,
    torch_logits,
)

TEXT = "the key of the cat is seven, and the key of the dog is four; né à l'été. " * 4
COARSE = "kivi:bits=2,recent=4,block=4"
WINDOW, STRIDE = 48, 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a directory with a random one-layer model, a tokenizer and the text."""
    directory = tmp_path_factory.mktemp("model")
    return save_with_tokenizer(directory, TEXT, vocab_size=280, max_position_embeddings=64)


def request(model, more="", caches=("dense",)):
    of_caches = " ".join(f"--cache {cache}" for cache in caches)
    sizes = f"--window {WINDOW} --stride {STRIDE}"
    return f"eval {model} --text {model / 'text.txt'} {of_caches} {sizes} {more}"


def their_nats(model, ids, window, stride):
    """The loop of "Perplexity of fixed-length models" in transformers' documentation, but with each
    -log p instead of their means."""
    import torch

    nats, end_before = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        labels = torch.tensor(ids[None, begin:end], dtype=torch.long)
        labels[:, : -(end - end_before)] = -100
        logits = torch.from_numpy(torch_logits(model, ids[None, begin:end]))
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")
        nats += losses[labels[0, 1:] != -100].tolist()
        end_before = end
        if end == len(ids):
            break
    return np.array(nats)


def test_a_dense_cache_has_the_perplexity_of_transformers(tmp_path, run_json):
    pytest.importorskip("torch", reason="parity with transformers needs torch")
    fields = {"vocab_size": 280, "num_hidden_layers": 1, "head_dim": 16}
    reference = build_checkpoint(tmp_path, CheckpointCase("llama", fields))
    save_tokenizer(train_tokenizer([TEXT], 280), tmp_path, 64)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    found = run_json(request(tmp_path))
    ids = np.asarray(text_input.load_tokenizer(str(tmp_path))(TEXT).input_ids)
    theirs = their_nats(reference, ids, WINDOW, STRIDE)
    assert found["scored_tokens"] == theirs.size == len(ids) - 1
    for name, numbers in (("no cache", found["exact"]), ("dense", found["caches"][0])):
        assert numbers["perplexity"] == pytest.approx(np.exp(theirs.mean()), rel=1e-4), name
        per_byte = theirs.sum() / np.log(2) / len(TEXT.encode())
        assert numbers["bits_per_byte"] == pytest.approx(per_byte, rel=1e-4), (
            "every byte of the text was scored"
        )
    for window, stride in ((WINDOW, STRIDE + 1), (WINDOW - 1, STRIDE)):
        other = np.exp(their_nats(reference, ids, window, stride).mean())
        assert found["exact"]["perplexity"] != pytest.approx(other, rel=1e-4), (
            f"the comparison does not see windows of {window} by {stride}"
        )


def test_json_holds_the_numbers_of_the_library(model, run_json):
    caches = ("dense", COARSE)
    found = run_json(request(model, "--flips --buckets 3 --limit 100 --mode fake", caches))
    llama, tokenizer = load_llama(model, dtype="float32")
    text = tokenize(tokenizer, TEXT).first(100)
    sizes = {"window": WINDOW, "stride": STRIDE, "mode": "fake"}
    pairs = [(llama, cache) for cache in caches]
    results = evaluate_caches(pairs, text.ids, token_bytes=text.bytes, **sizes)
    facts = {"text_tokens": 100, "scored_tokens": 99, "dtype": "float32"}
    assert found.items() >= (sizes | facts | {"chunk": None, "step": None}).items()
    assert found["scored_bytes"] == results[0].utf8_bytes
    parts = results[0].by_position(3)
    assert found["positions"] == [
        {"first": p.first, "last": p.last, "tokens": p.tokens} for p in parts
    ]
    assert found["exact"]["by_position"]["nats"] == [p.exact_nats for p in parts]
    for row, cache, result in zip(found["caches"], caches, results, strict=True):
        assert (row["name"], kvq.parse(row["cache"])) == (cache, kvq.parse(cache))
        assert row["kl"] == result.mean_kl
        for name in ("perplexity", "bits_per_byte", "agreement"):
            assert row[name] == getattr(result, name), name
        assert row["flip_positions"] == result.flips.tolist()
        assert row["flips"] == len(row["flip_positions"]) == sum(row["by_position"]["flips"])
        assert row["by_position"]["kl"] == [p.kl for p in result.by_position(3)]
        size = kvq.size.nbytes(kvq.cache.layout(cache, llama.config, 1, WINDOW, "bfloat16"))
        assert (row["cache_bytes"], row["ratio"]) == (size, found["bf16_bytes"] / size)
    assert found["bf16_bytes"] == kvq.size.dense_nbytes(llama.config, 1, WINDOW)
    dense, coarse = found["caches"]
    assert dense["kl"] < 1e-6 < 1e-2 < coarse["kl"]
    assert coarse["ratio"] > dense["ratio"]


@pytest.mark.parametrize(
    ("cache", "more", "warned"),
    [
        # the second chunk reads 44 tokens, of which 40 are in the body
        (COARSE, "--mode chunked --chunk 44", False),
        (COARSE, "--mode chunked --chunk 48", True),
        ("kivi:recent=44,block=4", "", True),
        ("kivi:recent=60,block=4", "--mode fake", False),
    ],
)
def test_a_warning_comes_exactly_when_nothing_is_read_quantized(model, run, cache, more, warned):
    _, out, err = run(request(model, f"--json {more}", (cache,)))
    assert ("nothing is read quantized" in err) is warned, err
    assert (json.loads(out)["caches"][0]["kl"] < 1e-9) is warned


@pytest.mark.parametrize("batch", [0, 2])
def test_ctrl_c_shows_the_windows_that_were_complete(model, run, run_json, press_in, batch):
    asked = f"--batch 1 --mode chunked --chunk {WINDOW} --json"
    whole = run_json(request(model, asked))
    two = run_json(request(model, f"{asked} --limit {STRIDE + WINDOW}"))
    press_in("", batch)  # a window is a slice
    code, out, err = run(request(model, asked))
    shown = json.loads(out)
    assert code == 130
    if batch == 0:
        assert shown["error"] == "interrupted"
        return
    assert err.endswith("interrupted: the numbers are of the windows that were read by then\n")
    assert shown["scored_tokens"] == two["scored_tokens"] < whole["scored_tokens"]
    assert shown["exact"] == two["exact"]
    assert shown["exact"]["perplexity"] != whole["exact"]["perplexity"]


# --- errors


def test_a_cache_that_gives_nan_is_reported_as_such(model, run, monkeypatch):
    command = importlib.import_module("kvq_tools.cli.commands.eval")

    def broken(*arguments, **options):
        results = evaluate_caches(*arguments, **options)
        for result in results:
            result.nats[:] = np.nan
            result.kl[:] = np.nan
        return results

    monkeypatch.setattr(command, "evaluate_caches", broken)
    code, out, err = run(request(model, "--mode fake --json"))
    assert code == 3
    assert "not finite (nan or inf) with dense" in err
    row = json.loads(out)["caches"][0]
    assert (row["perplexity"], row["kl"], row["bits_per_byte"]) == (None, None, None)
    code, out, _ = run(request(model, "--mode fake"))
    assert code == 3
    assert "│ dense    │          - │" in out
