"""Calibration: a sample records what the exact model computes, an interrupted run ends like an
uninterrupted one, and requests that cannot be met are refused."""

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.methods.kvquant.codec import KVQuantCodec
from kvq_jax.types.rope import rotate
from kvq_models import forward, save_calibration
from kvq_models.calibration import fit, samples
from kvq_models.calibration.activations import record
from kvq_models.calibration.needs import needs
from kvq_models.llama.model import causal_attention
from kvq_models.llama.rope import rope_for, ropes_for
from tests.exhaustive import some
from tests.kvq_models.calibration_runs import KEYS_ONLY, LENGTH, SPEC, TEXT, run
from tests.kvq_models.checkpoints import YARN, random_llama, random_tokens, row_errors, tiny_config

# --- what a sample records


def recorded(llama, window) -> tuple[float, dict[tuple[int, str, str], np.ndarray]]:
    found = {}
    loss = record(
        llama,
        np.asarray(window),
        lambda r: found.update({(r.layer, r.side, r.what): np.asarray(r.array, np.float32)}),
    )
    return loss, found


def exact(
    llama, window, perturbations: dict[tuple[int, str], jax.Array] | None = None
) -> tuple[jax.Array, dict[tuple[int, str], jax.Array]]:
    """Return (sum of the losses, rows [T, K, H]) of a plain forward pass, with something added to
    the keys or values of some layers."""
    tokens = jnp.asarray(window)[None]
    length = tokens.shape[1] - 1
    positions, valid, rope = (
        jnp.arange(length)[None],
        jnp.ones((1, length), bool),
        ropes_for(llama.config, length),
    )
    hidden, rows = llama.embed_tokens(tokens[:, :-1]), {}
    for index, layer in enumerate(llama.layers):
        inputs = layer.attention_inputs(hidden, positions, valid, rope)
        rows[index, "k"], rows[index, "v"] = (
            jnp.swapaxes(array[0], 0, 1) for array in (inputs.k_pre, inputs.v)
        )
        add = {
            side: jnp.swapaxes(
                (perturbations or {}).get((index, side), 0 * rows[index, side]), 0, 1
            )[None]
            for side in ("k", "v")
        }
        k_rot = rotate(inputs.k_pre + add["k"], positions, layer.rope(rope))
        hidden = layer.finish(
            hidden, causal_attention(inputs.q_rot, k_rot, inputs.v + add["v"], valid)
        )
    logprobs = jax.nn.log_softmax(llama.logits(hidden)[0], axis=-1)
    return -jnp.take_along_axis(logprobs, tokens[0, 1:, None], axis=1).sum(), rows


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], ["float32"]))
def test_a_sample_records_the_rows_of_the_exact_forward_pass_and_its_loss(dtype):
    llama = random_llama(tiny_config("qwen3"), dtype=jnp.dtype(dtype))
    window = random_tokens((1, LENGTH + 1))[0]
    loss, found = recorded(llama, window)
    _, rows = jax.jit(exact)(llama, window)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for (layer, side), want in rows.items():
        errors = row_errors(found[layer, side, "rows"], want)
        assert errors.max() < tolerance, (
            f"layer {layer}, {side}: {errors.max()} at (token, head)"
            f" {np.unravel_index(errors.argmax(), errors.shape)}"
        )
        assert row_errors(found[1 - layer, side, "rows"], want).min() > 0.1, (
            "another layer's rows pass too"
        )
    logprobs = jax.nn.log_softmax(jax.jit(forward)(llama, window[None, :-1])[0], axis=-1)
    assert loss == pytest.approx(
        -float(jnp.take_along_axis(logprobs, window[1:, None], axis=1).mean()), rel=tolerance
    )


def test_recorded_gradients_are_the_slopes_of_the_loss():
    """Finite differences along random directions, each in one side of one layer."""
    llama, random = random_llama(tiny_config(num_hidden_layers=3)), np.random.default_rng(0)
    window, step = random_tokens((1, LENGTH + 1))[0], 1e-2
    _, found = recorded(llama, window)
    loss = jax.jit(lambda *a: exact(*a)[0])
    for layer in range(3):
        for side in ("k", "v"):
            gradient = found[layer, side, "gradients"]
            noise = random.standard_normal(gradient.shape, np.float32)
            # noise alone has almost no slope
            direction = gradient / np.linalg.norm(gradient) + noise / np.linalg.norm(noise)
            direction = jnp.asarray(direction / np.linalg.norm(direction))
            up, down = (
                float(loss(llama, window, {(layer, side): sign * step * direction}))
                for sign in (1, -1)
            )
            slope, size = (up - down) / (2 * step), float(np.linalg.norm(gradient))
            assert abs(slope - float(np.sum(gradient * direction))) < 0.02 * size, (
                f"layer {layer}, {side}"
            )
            for wrong in (np.roll(gradient, 1, axis=0), 1.1 * gradient):
                assert abs(slope - float(np.sum(wrong * direction))) > 0.02 * size, (
                    f"layer {layer}, {side}: a wrong gradient passes too"
                )


# --- what a codec is given


class Calls(NamedTuple):
    rows: list[np.ndarray]
    gradients: list[np.ndarray]


@pytest.fixture
def given(monkeypatch):
    """Return the arguments of the codecs' `calibrate`, side by side in the order of the layers."""
    calls, original = Calls([], []), KVQuantCodec._calibrate

    def calibrate(self, rows, gradients):
        calls.rows.append(rows)
        calls.gradients.append(gradients)
        return original(self, rows, gradients)

    monkeypatch.setattr(KVQuantCodec, "_calibrate", calibrate)
    return calls


def test_a_codec_gets_the_rows_that_it_caches_without_sinks_and_gradients_of_the_mean_loss(
    given, tmp_path
):
    llama, sink = random_llama(tiny_config()), 3
    run(tmp_path / "w", f"{SPEC},sink={sink}", llama=llama)
    windows = samples.draw(TEXT, 3, LENGTH, 0, None)
    for index, name in enumerate(needs(kvq.parse(SPEC), llama.config)):
        layer, side = int(name.split(".")[1]), name[-1]
        rows, gradients = (
            np.concatenate([recorded(llama, w)[1][layer, side, what][sink:] for w in windows])
            for what in ("rows", "gradients")
        )
        np.testing.assert_array_equal(given.rows[index], rows, err_msg=name)
        np.testing.assert_allclose(
            given.gradients[index], gradients / LENGTH, rtol=1e-6, err_msg=name
        )
        assert given.rows[index].dtype == given.gradients[index].dtype == np.float32


def test_keys_that_are_cached_after_rope_come_rotated_and_so_do_their_gradients(given, tmp_path):
    """A step dk before RoPE is the step rotate(dk) after it, so both gradients give the same change
    of the loss."""
    llama = random_llama(tiny_config(head_dim=32, rope_scaling=YARN))
    factor = float(rope_for(llama.config, LENGTH).attention_factor)
    assert factor > 1.1, "the test needs an attention factor"
    spec = "k=kvquant:bits=2,outliers=0.1{}+v=kivi:bits=2+cache:sink=0,recent=0,block=32"
    for pre_rope in (",pre_rope=true", ",pre_rope=false"):
        run(tmp_path / "w", spec.format(pre_rope), llama=llama, samples=1)
    positions, rope = jnp.arange(LENGTH)[None], rope_for(llama.config, LENGTH)

    def rotated(rows):
        return np.asarray(
            jnp.swapaxes(
                rotate(jnp.swapaxes(jnp.asarray(rows), 0, 1)[None], positions, rope)[0], 0, 1
            )
        )

    step = np.random.default_rng(0).standard_normal(given.rows[0].shape).astype(np.float32)
    for layer in range(2):
        before, after = layer, 2 + layer
        np.testing.assert_allclose(
            given.rows[after], rotated(given.rows[before]), rtol=1e-5, atol=1e-6
        )
        change = np.sum(given.gradients[before] * step, axis=-1)
        np.testing.assert_allclose(
            np.sum(given.gradients[after] * rotated(step), axis=-1),
            change,
            rtol=1e-3,
            atol=1e-6 * np.abs(change).max(),
        )
        assert (
            np.abs(np.sum(factor * given.gradients[after] * rotated(step), axis=-1) - change).max()
            > 0.05 * np.abs(change).max()
        )


# --- the same bytes


def saved(calibration, directory) -> str:
    save_calibration(calibration, directory / "saved.safetensors")
    return hashlib.sha256((directory / "saved.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def expected(work, tmp_path):
    """Return the hash of the file that a run without interruptions makes."""
    return saved(run(work), tmp_path)


class Interrupted(Exception):
    pass


def interrupts(function, after):
    """`function`, but only `after` calls of it."""
    calls = []

    def call(*arguments):
        if len(calls) == after:
            raise Interrupted
        calls.append(arguments)
        return function(*arguments)

    return call


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(expected, tmp_path):
    assert saved(run(tmp_path / "again"), tmp_path) == expected
    assert saved(run(tmp_path / "other", seed=1), tmp_path) != expected


def test_another_cache_is_calibrated_from_the_same_samples_without_running_the_model(
    work, monkeypatch
):
    monkeypatch.setattr(fit, "record", interrupts(record, 0))
    three, keys = run(work, SPEC.replace("bits=2", "bits=3")), run(work, KEYS_ONLY)
    assert three.tensors["layers.0.k.levels"].shape == (8,)
    assert set(keys.keys) == {"layers.0.k", "layers.1.k"}, "KIVI's values need nothing"
    np.testing.assert_array_equal(
        keys.tensors["layers.1.k.levels"], three.tensors["layers.1.k.levels"]
    )


def test_fits_that_left_other_sinks_out_are_not_taken_up(work):
    few, many = run(work), run(work, f"{SPEC},sink=15")
    assert few.keys == many.keys, "windows are not part of the options"
    assert np.abs(few.tensors["layers.0.k.scale"] - many.tensors["layers.0.k.scale"]).max() > 0.01
