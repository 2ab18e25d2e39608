"""The simulation of waterfill's variants: exact rows cost nothing, and its waterfill is the
method's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.codec import Side, TokensAt
from kvq_jax.types.rope import Rope, rotate
from kvq_models import EMBEDDED, load_llama
from kvq_tools.evaluation.text import passage
from laboratory.waterfill import moments, variants
from laboratory.waterfill.simulation import kl_through, scene_of

HEADS, WIDTH, TOKENS = 2, 64, 96


def test_rows_read_exactly_cost_nothing_and_others_do():
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32", weights="dense")
    ids = np.asarray(tokenizer(passage()).input_ids[:129], np.int32)
    scene = scene_of(llama, ids[None], 96)

    def read(scale: float, expected: bool = False):
        def quantize(layer, side, rows, positions, rope):
            return scale * (rotate(rows, positions, rope) if side == "k" else rows)

        return kl_through(llama, scene, quantize, expected=expected).mean()

    exact = read(1.0)
    assert exact < 1e-5
    assert read(0.0) > 100 * max(exact, 1e-6), "rows that are not read"
    assert read(1.0, expected=True) == exact, "rows without an error have the weights that they had"
    errors = read(0.5), read(0.5, expected=True)
    assert abs(errors[0] - errors[1]) > 0.01 * errors[0], "errors of keys change no weight"


@pytest.mark.parametrize("options", ["", ",key_basis=eigen"])
def test_the_simulated_waterfill_reads_rows_as_the_method_does(options: str):
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(HEADS, WIDTH, WIDTH)) * 2.0 ** -np.linspace(0, 4, WIDTH)
    rows, slopes = (
        np.einsum("tkc,kdc->tkd", rng.normal(size=(400, HEADS, WIDTH)), mixing).astype(np.float32)
        for _ in range(2)
    )
    x, g = (np.moveaxis(a.astype(np.float64), 1, 0) for a in (rows, slopes))
    one = moments.Moments(
        x.mean(axis=1)[None],
        (np.swapaxes(x, 1, 2) @ x / 400)[None],
        (np.swapaxes(g, 1, 2) @ g / 400)[None],
    )
    dims = CacheDims(1, HEADS, HEADS, WIDTH, 256)
    spec = kvq.parse("waterfill:k_widths=65432210,v_widths=65432210" + options)
    widths = {side: np.repeat([[6, 5, 4, 3, 2, 2, 1, 0]], 8, axis=1) for side in moments.SIDES}
    fit = variants.eigen if options else variants.pairs
    bases: dict[Side, variants.Basis] = {"k": fit(one), "v": variants.eigen(one)}
    variant = variants.Variant(bases, widths, variants.Rule())
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    rope = Rope(1e-4 ** (jnp.arange(WIDTH / 2) / (WIDTH / 2)), jnp.ones(()))
    window = jnp.asarray(np.moveaxis(rows[:TOKENS], 0, 1))[None]
    for side in moments.SIDES:
        codec = getattr(spec, side).codec(side, 0, dims, 32, "float32")
        fitted = jax.tree.map(jnp.asarray, codec.learning.calibrate(rows, slopes))
        params = codec.learning.carry(fitted)
        body = codec.quantize(params, (), window, TokensAt(positions, prefill=True))
        wanted = codec.vectors(params, codec.dequantize(params, (), body), positions, rope)
        read = variant(0, side, window, positions, rope)
        off = np.abs(np.asarray(read - wanted)) > 1e-3 * np.abs(np.asarray(wanted)).max()
        assert off.any(axis=-1).mean() < 0.05, f"{side}: {off.any(axis=-1).mean():.0%} tokens off"


def test_channels_have_a_variance_of_one_on_the_rows_that_their_scales_are_of():
    rng = np.random.default_rng(1)

    def random_moments() -> moments.Moments:
        roots = rng.normal(size=(2, 1, HEADS, 8, 8))
        second, metric = roots @ np.swapaxes(roots, -1, -2)
        return moments.Moments(np.zeros((1, HEADS, 8)), second, metric)

    here, there = random_moments(), random_moments()
    there = there._replace(mean=np.ones_like(there.mean), second=there.second + 1)
    basis = variants.eigen(here)
    moved = variants.rescaled(basis, there, deviations=True)
    turned = np.swapaxes(moved.analysis, -1, -2) @ there.covariance @ moved.analysis
    np.testing.assert_allclose(np.diagonal(turned, axis1=-2, axis2=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(moved.analysis @ moved.synthesis, [[np.eye(8)] * HEADS], atol=1e-6)
    np.testing.assert_array_equal(moved.mean, there.mean)
    turned = np.swapaxes(basis.analysis, -1, -2) @ there.covariance @ basis.analysis
    off = np.abs(np.diagonal(turned, axis1=-2, axis2=-1) - 1)
    assert off.max() > 0.1, "channels of the basis as it was have that variance, too"
    kept = variants.rescaled(basis, there, deviations=False)
    np.testing.assert_array_equal(kept.analysis, basis.analysis)
    np.testing.assert_array_equal(kept.mean, there.mean)
