"""`kvq generate` reports the kernels that ran, in a process that believes it has a GPU and
interprets kernels."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvq_jax.attention import dispatch, fused
from kvq_models import save_llama
from pallas_kernels.launch import Launch
from tests.kvq_models.checkpoints import random_llama, tiny_config

CACHE = "kivi:bits=4,recent=32,block=32"
NEW = 6


def saved(layers: int, directory):
    """Save a random model with a head_dim that kernels serve, without a tokenizer."""
    save_llama(
        random_llama(
            tiny_config(head_dim=64, num_hidden_layers=layers, max_position_embeddings=256)
        ),
        directory,
    )
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(1, tmp_path_factory.mktemp("model"))


@pytest.fixture
def launched(monkeypatch) -> list[Launch]:
    """Return the launches of kernels that read caches, on an apparent GPU."""
    jax.clear_caches()  # layers that were traced before would launch nothing
    found, attention = [], fused.decode_attention
    monkeypatch.setattr(dispatch, "no_device", lambda kernels="pallas": None)
    monkeypatch.setattr(dispatch, "_kernels_here", lambda: "pallas")
    monkeypatch.setattr(dispatch, "LAUNCH", Launch(interpret=True))
    monkeypatch.setattr(
        fused,
        "decode_attention",
        lambda *args, launch, **named: (
            found.append(launch) or attention(*args, launch=launch, **named)
        ),
    )
    return found


def arguments(model, cache: str = CACHE) -> list[str]:
    ids = np.random.default_rng(0).integers(3, 96, 100)
    return [
        "generate",
        model,
        "--prompt-ids",
        ",".join(map(str, ids)),
        "--cache",
        cache,
        f"--max-new-tokens={NEW}",
        "--dtype=float32",
    ]


def test_the_footer_says_pallas_where_kernels_read_the_cache(model, launched, run, run_json):
    code, out, err = run(*arguments(model))
    assert code == 0, err
    assert "; implementation pallas; " in out.splitlines()[-1]
    assert set(launched) == {Launch(interpret=True)}, "no kernel was traced, or another one"
    found, xla = run_json(*arguments(model)), run_json(*arguments(model), "--implementation", "xla")
    assert (found["implementation"], xla["implementation"]) == ("pallas", "xla")
    assert found["quantized_tokens"] > 0, "nothing for a kernel to read"
    assert found["tokens"] == xla["tokens"]
    assert len(set(found["tokens"])) > 1


def test_without_a_gpu_the_footer_says_native_or_why_not(model, run):
    """Negative control: the same command."""
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    _, out, _ = run(*arguments(model))
    here = (
        "native; " if dispatch.no_device("native") is None else "xla (no kernel: the CPU kernels "
    )
    assert f"; implementation {here}" in out.splitlines()[-1]
    _, out, _ = run(*arguments(model), "--implementation", "xla")
    assert "; implementation xla; " in out.splitlines()[-1], (
        "XLA needs no reason where it was asked for"
    )


def test_the_footer_says_why_no_native_kernel_ran(model, monkeypatch, run, run_json):
    monkeypatch.setattr(dispatch, "unavailable", lambda: "the CPU kernels were not compiled")
    _, out, _ = run(*arguments(model))
    assert (
        "; implementation xla (no kernel: the CPU kernels were not compiled); "
        in out.splitlines()[-1]
    )
    assert (
        run_json("doctor", model, "--cache", CACHE)["facts"]["kernels here"]
        == "none: the CPU kernels were not compiled"
    )
    code, _, err = run(*arguments(model), "--implementation", "native")
    assert code != 0
    assert "implementation='native' cannot run: the CPU kernels were not compiled" in err
