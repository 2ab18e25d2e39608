"""PolarQuant's codes against its public implementation (a slice in tests/golden/), and what the
polar form must never do."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import polar_array
from kvq_jax.arrays.packing import unpack
from kvq_jax.arrays.polar_array import PolarFormat
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.methods.polarquant.method import PolarCodec
from tests.kvq_jax.methods.test_golden import compare_codes, compare_numbers, golden
from tests.kvq_jax.origins import PROMPT

NAME = "polarquant_m4n4_g128"
FORMAT = PolarFormat(4, 4, 64, 128, 128, cut="fixed", scale_dtype="float32")


def codes_of(body: polar_array.PolarArray) -> np.ndarray:
    return np.asarray(unpack(body.words, body.format.layout))


def round_trip(rows: np.ndarray, format: PolarFormat) -> np.ndarray:
    return np.asarray(polar_array.dequantize(polar_array.quantize(jnp.asarray(rows), format)))


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_grouped_codes_match_the_public_code():
    data = golden(NAME)
    body = polar_array.quantize(jnp.asarray(data["K"]), FORMAT)
    expected = data["indices"].reshape(codes_of(body).shape)
    compare_codes(codes_of(body) >> 4, expected >> 4)
    compare_codes(codes_of(body) & 15, expected & 15)
    for name, stored in (
        ("rscale", body.radius_scale),
        ("rmn", body.radius_zero),
        ("tscale", body.angle_scale),
        ("tmn", body.angle_zero),
    ):
        np.testing.assert_allclose(
            np.asarray(stored), data[name][:, :, :, 0], rtol=1e-5, atol=1e-6, err_msg=name
        )
    same = codes_of(body) == expected
    pairs = np.concatenate([same, same], axis=-1)
    found = np.asarray(polar_array.dequantize(body))
    compare_numbers(found[pairs], data["k_deq"][pairs])
    with pytest.raises(AssertionError):
        compare_numbers(-found, data["k_deq"])


def test_the_papers_first_formulas_with_their_sign_corrected():
    data, format = golden(NAME), dataclasses.replace(FORMAT, grid="global")
    step = jnp.asarray(data["v1_sj"])
    body = polar_array.quantize(jnp.asarray(data["K"]), format, step)
    compare_codes(codes_of(body) >> 4, data["v1_qr"])
    off = (codes_of(body) & 15).astype(int) - data["v1_qtheta"].astype(int)
    assert (np.abs((off + 8) % 16 - 8) <= 1).all(), "an angle is off by more than one step"
    assert (off != 0).mean() <= 1e-3
    same = np.tile((off == 0) & (codes_of(body) >> 4 == data["v1_qr"]), 2)
    compare_numbers(
        np.asarray(polar_array.dequantize(body, step))[same], data["v1_deq_minus_pi"][same]
    )


def test_angles_around_zero_do_not_waste_the_circle():
    """A group whose angles lie on both sides of the angle 0 has the error of one that does not."""
    rng = np.random.default_rng(0)
    radius, angle = rng.uniform(1, 2, (1, 1, 128, 32)), rng.normal(0, 0.2, (1, 1, 128, 32))
    turned = np.exp(1j * 2.0)
    pairs = radius * np.exp(1j * angle)

    def error(pairs: np.ndarray, cut: str) -> float:
        rows = np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)
        return relative(round_trip(rows, dataclasses.replace(FORMAT, cut=cut)), rows)

    assert error(pairs, "gap") == pytest.approx(error(pairs * turned, "fixed"), rel=0.1)
    assert error(pairs, "fixed") > 3 * error(pairs, "gap"), (
        "the fixed cut wastes most of the circle here"
    )
    opposite = pairs * np.exp(1j * np.pi)  # around the other end of arctan2
    assert error(opposite, "gap") == pytest.approx(error(pairs, "gap"), rel=0.1)


@pytest.mark.parametrize("option", ["radius_scale=sqrt", "cut=fixed"])
def test_options_of_groups_are_refused_on_the_global_grid(option: str):
    dims = CacheDims(1, 4, 2, 128, 512)
    with pytest.raises(ValueError, match=f"{option} is for grid=grouped"):
        kvq.init_cache(f"polarquant:grid=global,{option}", dims, 1, 128)


def test_no_kernel_reads_square_roots():
    dims = CacheDims(1, 4, 2, 128, 512)
    sqrt, linear = (
        kvq.parse(f"polarquant:radius_scale={s}").layer(0, dims, 256, "bfloat16").k.kernels.reader()
        for s in ("sqrt", "linear")
    )
    assert sqrt == "square roots of radii; kernels read radii"
    assert not isinstance(linear, str)


def test_pairs_without_a_radius_widen_no_angle():
    rng = np.random.default_rng(1)
    pairs = np.exp(1j * (2 + rng.normal(0, 0.05, (1, 1, 128, 32))))
    pairs[:, :, ::4] = 0  # arctan2(0, 0) is 0, far from 2
    rows = np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)
    body = polar_array.quantize(jnp.asarray(rows), FORMAT)
    assert np.asarray(body.angle_scale).max() * 16 < 0.5, (
        "the range of angles holds those of pairs without a radius"
    )
    zeros = np.asarray(polar_array.dequantize(body))[:, :, ::4]
    assert np.isfinite(zeros).all()
    assert np.abs(zeros).max() <= 1 / 16, "a radius of 0 is read as more than one bin"
    nothing = round_trip(np.zeros((1, 1, 128, 64), np.float32), FORMAT)
    np.testing.assert_array_equal(nothing, 0)


@pytest.mark.parametrize("scale", ["linear", "sqrt"])
@pytest.mark.parametrize("cut", ["gap", "fixed"])
def test_a_constant_group_decodes_to_its_value(cut: str, scale: str):
    row = np.random.default_rng(2).normal(size=64).astype(np.float32)
    rows = np.broadcast_to(row, (1, 2, 128, 64))
    np.testing.assert_allclose(
        round_trip(rows, dataclasses.replace(FORMAT, cut=cut, radius_scale=scale)), rows, atol=1e-5
    )


@pytest.mark.parametrize(("bits", "grid"), [((1, 3), "grouped"), ((6, 2), "global")])
def test_looked_up_products_and_keys_give_the_same_scores(bits: tuple[int, int], grid: str):
    """One query row makes no key, three do; both are held against float64 keys from the codes and
    the formulas of the paper."""
    rng = np.random.default_rng(4)
    rows, q = (rng.normal(size=(2, 2, n, 32)).astype(np.float32) for n in (64, 3))
    spec = f"polarquant:angle_bits={bits[0]},radius_bits={bits[1]},grid={grid},group_size=32"
    codec = kvq.parse(spec).layer(0, CacheDims(1, 4, 2, 32, 64), 64, "float32").k
    assert isinstance(codec, PolarCodec)
    step = jnp.asarray(rng.uniform(0.1, 0.5, (2, 2, 1, 16)), jnp.float32)
    body = codec.quantize((), step, jnp.asarray(rows), PROMPT)

    codes = np.asarray(unpack(body.words, body.format.layout)).reshape(2, 2, -1, 32, 16)
    angle, radius = (
        (codes & (2 ** bits[0] - 1)).astype(np.float64),
        (codes >> bits[0]).astype(np.float64),
    )
    if grid == "global":
        angle, radius = (
            angle * 2 * np.pi / 2 ** bits[0] - np.pi,
            radius * np.asarray(step)[:, :, None],
        )
    else:
        stored = (body.angle_scale, body.angle_zero, body.radius_scale, body.radius_zero)
        scale, zero, r_scale, r_zero = (
            np.asarray(s, np.float64)[:, :, :, None] for s in stored if s is not None
        )
        angle, radius = (angle + 0.5) * scale + zero, (radius + 0.5) * r_scale + r_zero
    parts = [(radius * f(angle)).reshape(2, 2, 64, 16) for f in (np.cos, np.sin)]
    wanted = np.einsum("bkrh,bkth->bkrt", q, np.concatenate(parts, axis=-1))

    def compare(name: str, found: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(wanted).max(), err_msg=name)

    positions = jnp.zeros((1, 64), jnp.int32)
    three = np.asarray(codec.scores((), step, jnp.asarray(q), body, positions, None))
    ones = [
        np.asarray(codec.scores((), step, jnp.asarray(q[:, :, r : r + 1]), body, positions, None))
        for r in range(3)
    ]
    compare("keys", three, wanted)
    compare("products", np.concatenate(ones, axis=2), wanted)
    compare(
        "decoded",
        np.einsum("bkrh,bkth->bkrt", q, np.asarray(codec.dequantize((), step, body))),
        wanted,
    )
    turned = np.concatenate([q[..., 16:], -q[..., :16]], axis=-1)  # q . k turned by a quarter
    with pytest.raises(AssertionError):
        compare(
            "turned",
            np.asarray(
                codec.scores((), step, jnp.asarray(turned[:, :, :1]), body, positions, None)
            ),
            wanted[:, :, :1],
        )


def test_cosines_are_made_for_groups_and_not_for_tokens(monkeypatch: pytest.MonkeyPatch):
    """The largest array in a computation that makes a cosine: XLA on CPUs likes to make each one
    where it is used. Without the loop over cosine and sine, with 3 bits, it does (20 times
    slower)."""
    rng = np.random.default_rng(0)
    tokens, half = 512, 32
    body = polar_array.quantize(
        jnp.asarray(rng.normal(size=(1, 2, tokens, 2 * half)), jnp.float32),
        PolarFormat(3, 2, 2 * half, 128, 128),
    )
    q = jnp.asarray(rng.normal(size=(1, 2, 1, 2 * half)), jnp.float32)

    def keys(q, body):
        (q_x, q_y), (k_x, k_y) = jnp.split(q, 2, axis=-1), polar_array.key_halves(body, None)
        return dot_rows(q_x, k_x) + dot_rows(q_y, k_y)

    def products(q, body):
        return polar_array.row_scores(q, body, None)

    def largest(scores) -> int:
        text = jax.jit(lambda *given: scores(*given)).lower(q, body).compile().as_text()
        made = [part for part in text.split("\n\n") if re.search(r" (co)?sine\(", part)]
        assert made, "no cosine at all: the comparison says nothing"
        shapes = [shape for part in made for shape in re.findall(r"f32\[([\d,]+)\]", part)]
        return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)

    for scores in (keys, products):
        assert largest(scores) < 2 * tokens * half, f"{scores.__name__}: a cosine for each token"
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(polar_array.lax, "map", lambda f, x: jnp.stack([f(one) for one in x]))
        assert largest(keys) >= 2 * tokens * half, "the loop may have become needless"
