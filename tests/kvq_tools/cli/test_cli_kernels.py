"""`kvq generate` reports the kernels that ran, in a process that believes it has a GPU and
interprets kernels."""

import jax
import numpy as np
import pytest

from kvq_jax.attention import dispatch, fused
from kvq_models import save_llama
from pallas_kernels.launch import Launch
from tests.kvq_models.checkpoints import random_llama, tiny_config

CACHE = "kivi:bits=4,recent=32,block=32"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a random model with a head_dim that kernels serve, without a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    config = tiny_config(head_dim=64, num_hidden_layers=1, max_position_embeddings=256)
    save_llama(random_llama(config), directory)
    return directory


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


def generate_command(model) -> str:
    ids = ",".join(map(str, np.random.default_rng(0).integers(3, 96, 100)))
    options = f"--cache {CACHE} --max-new-tokens 6 --dtype float32"
    return f"generate {model} --prompt-ids {ids} {options}"


def test_the_footer_says_pallas_where_kernels_read_the_cache(model, launched, run, run_json):
    command = generate_command(model)
    code, out, err = run(command)
    assert code == 0, err
    assert "; implementation pallas; " in out.splitlines()[-1]
    assert set(launched) == {Launch(interpret=True)}, "no kernel was traced, or another one"
    found, xla = run_json(command), run_json(command, "--implementation", "xla")
    assert (found["implementation"], xla["implementation"]) == ("pallas", "xla")
    assert found["quantized_tokens"] > 0, "nothing for a kernel to read"
    assert found["tokens"] == xla["tokens"]
    assert len(set(found["tokens"])) > 1


def test_without_a_gpu_the_footer_says_native_or_why_not(model, run):
    """Negative control: the same command."""
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    _, out, _ = run(generate_command(model))
    reason = dispatch.no_device("native")
    here = "native; " if reason is None else f"xla (no kernel: {reason}"
    assert f"; implementation {here}" in out.splitlines()[-1]
    _, out, _ = run(generate_command(model), "--implementation", "xla")
    assert "; implementation xla; " in out.splitlines()[-1], (
        "XLA needs no reason where it was asked for"
    )


def test_the_footer_says_why_no_native_kernel_ran(model, monkeypatch, run, run_json):
    monkeypatch.setattr(dispatch, "unavailable", lambda: "the CPU kernels were not compiled")
    _, out, _ = run(generate_command(model))
    reason = "the CPU kernels were not compiled"
    assert f"; implementation xla (no kernel: {reason}); " in out.splitlines()[-1]
    facts = run_json("doctor", model, "--cache", CACHE)["facts"]
    assert facts["kernels here"] == f"none: {reason}"
    code, _, err = run(generate_command(model), "--implementation", "native")
    assert code != 0
    assert "implementation='native' cannot run: the CPU kernels were not compiled" in err
