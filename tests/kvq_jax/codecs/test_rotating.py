"""rotate=true: what is quantized are rotated rows, attention is that of the rows themselves, and
nothing changes where it is off."""

import hashlib

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.rotations import rotation, turn, turn_back
from kvq_jax.attention import dispatch
from kvq_jax.codecs.rotating import Rotating

DIMS = kvq.CacheDims(1, 4, 2, 64, 256)


def outliers(seed: int = 0, shape: tuple[int, ...] = (1, 2, 64, 64)) -> np.ndarray:
    """Normal rows in which two channels are 30 times as large."""
    rows = np.random.default_rng(seed).normal(size=shape)
    rows[..., [3, 40]] *= 30
    return rows.astype(np.float32)


@pytest.mark.parametrize("channels", [1, 3, 32, 64, 80, 96, 112, 128])
def test_a_rotation_keeps_dots_and_spreads_every_channel_over_all(channels: int):
    matrix = rotation(channels).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(channels), atol=1e-6)
    assert np.abs(matrix).max() <= np.sqrt(2 / channels) + 1e-6
    if channels & (channels - 1) == 0:
        np.testing.assert_allclose(np.abs(matrix), channels**-0.5, rtol=1e-6)
    x = np.random.default_rng(0).normal(size=(5, channels)).astype(np.float32)
    np.testing.assert_allclose(turn(jnp.asarray(x)), x @ matrix.T, atol=1e-5)
    np.testing.assert_allclose(turn_back(turn(jnp.asarray(x))), x, atol=1e-5)


def test_the_rotation_is_what_files_of_caches_were_written_with():
    """Of 64 channels: another matrix would read old files as noise."""
    signs = np.packbits(rotation(64) > 0).tobytes()
    assert hashlib.sha256(signs).hexdigest().startswith("af8298a1484daf8c")


def test_a_codec_that_is_fitted_to_its_layer_takes_no_rotation():
    """It would be fitted to other rows than those that it codes."""
    fitted, plain = (
        kvq.parse(spec).layer(0, DIMS, 64, "float32").k
        for spec in ("optr", "kvquant:pre_rope=false")
    )
    with pytest.raises(TypeError, match="fitted to its layer"):
        _ = Rotating(fitted).learning
    assert Rotating(plain).learning.fit, "another is fitted to rotated rows"


@pytest.mark.parametrize("spec", ["int4", "nf3:group_size=32", "innerq:bits=2", "mxfp4"])
def test_the_body_holds_what_the_method_makes_of_rotated_rows(spec: str):
    k, v = outliers(0), outliers(1)
    plain, matrix = spec + (":" if ":" not in spec else ","), rotation(64)
    found = kvq.roundtrip(f"{plain}rotate=true", jnp.asarray(k), jnp.asarray(v), layout="BNTH")
    wanted = [
        np.asarray(rows) @ matrix
        for rows in kvq.roundtrip(
            spec, jnp.asarray(k @ matrix.T), jnp.asarray(v @ matrix.T), layout="BNTH"
        )
    ]
    without = kvq.roundtrip(spec, jnp.asarray(k), jnp.asarray(v), layout="BNTH")
    for one, other, unrotated, given in zip(found, wanted, without, (k, v), strict=True):
        steps = np.abs(np.asarray(one) - other) > 1e-3 * np.abs(given).max()
        assert steps.mean() <= 1e-3, f"{steps.mean():.4f} of the entries differ"
        assert (np.abs(np.asarray(unrotated) - other) > 1e-3 * np.abs(given).max()).mean() > 0.1, (
            "unrotated rows would pass"
        )


def test_it_is_an_option_of_each_side_and_of_rows_that_are_quantized():
    plan = kvq.cache.layout("k=int4:rotate=true+v=kivi", DIMS, 1, 64).plans[0]
    assert (isinstance(plan.k, Rotating), isinstance(plan.v, Rotating)) == (True, False)
    assert plan.k.describe() == kvq.cache.layout("int4", DIMS, 1, 64).plans[0].k.describe() | {
        "rotate": True
    }
    exact = kvq.cache.layout("int4:rotate=true,skip_layers=0", DIMS, 1, 64).plans[0]
    assert exact.k.facts.exact, "rows in full precision are not rotated"
    assert str(kvq.parse("int4:rotate=true,sink=3")) == "int4:rotate=true,sink=3"
    for method in kvq.methods.METHODS.values():
        names = [option.name for option in method.options()]
        assert ("rotate" in names) == ("rotate" not in method.declines)
        assert "rotate" not in names[:-1], f"{method.name} lists it among its own"


def test_kernels_read_rotated_rows_after_rope():
    for kernels in ("pallas", "native"):
        assert (
            dispatch.unsupported(
                kvq.cache.layout("int4:rotate=true", DIMS, 1, 256).plans[0], 4, 1, kernels
            )
            is None
        )
        reason = dispatch.unsupported(
            kvq.cache.layout("int4:rotate=true,pre_rope=true", DIMS, 1, 256).plans[0], 4, 1, kernels
        )
        assert reason == "k: rotate=true with keys cached before RoPE, which no kernel turns back"


def test_a_calibration_is_that_of_rotated_rows():
    spec = "kvquant:bits=2,pre_rope=false,outliers=0.05"
    keys = outliers(2, (1, 2, 96, 64))
    given, turned = ({"k": rows, "v": rows} for rows in (keys, keys @ rotation(64).T))
    ones = {"k": np.ones_like(keys), "v": np.ones_like(keys)}
    found = kvq.parameters.calibrate(f"{spec},rotate=true", DIMS, 0, given, ones)["k"]["scale"]
    wanted = kvq.parameters.calibrate(spec, DIMS, 0, turned, ones)["k"]["scale"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert not np.allclose(
        found, kvq.parameters.calibrate(spec, DIMS, 0, given, ones)["k"]["scale"], rtol=0.1
    )
    keys_of = {
        o: kvq.cache.layout(f"{spec}{o}", DIMS, 1, 64).plans[0].k.learning.key
        for o in ("", ",rotate=true")
    }
    assert keys_of[",rotate=true"] == f"{keys_of['']},rotate=true"
