"""A calibration records moments of queries and the last of them, for the methods fitted to them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.methods.optr import fit
from kvq_models.calibration.activations import LAST_QUERIES, record
from kvq_models.calibration.store import _checksum
from kvq_models.llama.model import layer_forward
from kvq_models.llama.rope import ropes_for
from tests.kvq_models.calibration_runs import LENGTH, one_line, run
from tests.kvq_models.checkpoints import model, random_llama, random_tokens, tiny_config

SPEC = "k=block_gtq:scale_dtype=float32+v=int2+cache:sink=1,recent=0,block=32"


def queries_of(llama, window) -> list[np.ndarray]:
    """Return the queries after RoPE [N, T, H] of each layer, of a plain forward pass."""

    def every_layer(llama, tokens):
        length, queries = tokens.shape[1], []
        scene = jnp.arange(length)[None], jnp.ones((1, length), bool)
        rope, hidden = ropes_for(llama.config, length), llama.embed_tokens(tokens)
        for layer in llama.layers:
            queries.append(layer.attention_inputs(hidden, *scene, rope).q_rot[0])
            hidden = layer_forward(layer, hidden, *scene, rope)
        return queries

    return [np.asarray(q, np.float64) for q in jax.jit(every_layer)(llama, window[None, :-1])]


def test_a_sample_records_moments_and_the_last_queries_of_every_layer():
    llama = random_llama(tiny_config("qwen3"))
    length = LAST_QUERIES + 6
    window, arrays = random_tokens((1, length + 1))[0], {}
    record(llama, np.asarray(window), lambda r: arrays.update({(r.layer, r.side, r.what): r.array}))
    for layer, q in enumerate(queries_of(llama, window)):
        heads = llama.config.num_key_value_heads
        readers = q.reshape(heads, -1, *q.shape[1:])  # query heads side by side read one KV head
        moments = np.einsum("kgth,kgte->khe", readers, readers) / (readers.shape[1] * length)
        got = arrays[layer, "q", "moments"]
        np.testing.assert_allclose(got, moments, rtol=1e-3, atol=1e-5 * np.abs(moments).max())
        mixed = np.moveaxis(q.reshape(-1, heads, *q.shape[1:]), 1, 0)
        other = np.einsum("kgth,kgte->khe", mixed, mixed) / (mixed.shape[1] * length)
        apart = np.abs(other - moments).max() / np.abs(moments).max()
        assert apart > 0.05, f"other heads would pass: {apart:.3f}"
        last = np.swapaxes(q[:, -LAST_QUERIES:], 0, 1)
        np.testing.assert_allclose(arrays[layer, "q", "last"], last, atol=1e-3)


def test_energies_are_those_of_the_recorded_queries_and_keys(tmp_path: pathlib.Path):
    llama = model()
    calibration = run(tmp_path / "work", SPEC, llama=llama)
    directory, config = tmp_path / "work", llama.config
    heads, width = config.num_key_value_heads, config.head_dim
    shape = config.num_hidden_layers, 3, heads, width, width
    moments = np.fromfile(directory / "q.moments", np.float32).reshape(shape).mean(axis=1)
    rows = (*shape[:2], LENGTH, heads, width)
    keys = np.fromfile(directory / "k.rows", np.float32).reshape(rows)[:, :, 1:]
    for layer in range(config.num_hidden_layers):
        squares = np.square(keys[layer], dtype=np.float64).mean(axis=(0, 1))  # RoPE keeps pairs'
        squares += np.diagonal(moments[layer], axis1=1, axis2=2)
        pairs = (squares[:, : width // 2] + squares[:, width // 2 :]) / 2
        got = calibration.tensors[f"layers.{layer}.k.energies"]
        np.testing.assert_allclose(got, -np.sort(-pairs), rtol=1e-4)
    assert "k_widths=" in calibration.spec, "the calibration decides widths"


def test_samples_of_an_older_version_serve_all_methods_but_those_fitted_to_queries(
    tmp_path: pathlib.Path,
):
    work = tmp_path / "work"
    run(work)
    state = json.loads((work / "state.json").read_text())
    for digests in state["sha256_of_arrays"]:
        del digests["q.moments"], digests["q.last"]
    del state["sha256"]
    (work / "state.json").write_text(json.dumps(state | {"sha256": _checksum(state)}))
    (work / "q.moments").unlink()
    run(work, "waterfill:sink=1,block=8")
    one_line("are of an older version, which recorded no queries; delete it", run, work, SPEC)


@pytest.mark.parametrize("name", ["q.moments", "q.last"])
def test_damaged_queries_are_found(name: str, tmp_path: pathlib.Path):
    work, spec = tmp_path / "work", SPEC if name == "q.moments" else "optr:steps=1,sink=1"
    run(work, "waterfill:sink=1,block=8")
    content = bytearray((work / name).read_bytes())
    content[5] ^= 1
    (work / name).write_bytes(content)
    one_line(f"{name}' is damaged: sample 0 of layer 0", run, work, spec)


def test_a_fit_of_values_takes_the_keys_that_were_fitted(tmp_path: pathlib.Path, monkeypatch):
    llama, learned, keys = model(), [], fit.keys
    monkeypatch.setattr(fit, "keys", lambda *of: learned.append(of) or keys(*of))
    both = run(tmp_path / "both", "optr:steps=1,sink=1", llama=llama)
    assert len(learned) == llama.config.num_hidden_layers, "once for each layer"
    alone = run(tmp_path / "alone", "k=int2+v=optr:steps=1+cache:sink=1", llama=llama)
    turns = [name for name in alone.tensors if name.endswith("turn")]
    assert len(turns) == llama.config.num_hidden_layers
    for name in turns:
        np.testing.assert_array_equal(alone.tensors[name], both.tensors[name])
