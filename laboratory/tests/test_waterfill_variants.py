"""The simulation of waterfill's variants: exact rows cost nothing, and its waterfill is the
method's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.types.rope import Rope, rotate
from kvq_models import EMBEDDED, load_llama
from kvq_tools.evaluation.protocol import passage
from laboratory.waterfill import moments, variants
from laboratory.waterfill.simulation import kl_through, scene_of

HEADS, WIDTH, TOKENS = 2, 64, 96


def test_rows_read_exactly_cost_nothing_and_others_do():
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32", weights="dense")
    ids = np.asarray(tokenizer(passage()).input_ids[:129], np.int32)
    scene = scene_of(llama, ids[None], 96)

    def read(scale: float):
        def quantize(layer, side, rows, positions, rope):
            return scale * (rotate(rows, positions, rope) if side == "k" else rows)

        return kl_through(llama, scene, quantize).mean()

    exact = read(1.0)
    assert exact < 1e-5
    assert read(0.0) > 100 * max(exact, 1e-6), "rows that are not read"


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
    bases = {"k": fit(one), "v": variants.eigen(one)}
    variant = variants.Variant(bases, widths, variants.Rule())
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    rope = Rope(1e-4 ** (jnp.arange(WIDTH / 2) / (WIDTH / 2)), jnp.ones(()))
    window = jnp.asarray(np.moveaxis(rows[:TOKENS], 0, 1))[None]
    for side in moments.SIDES:
        codec = getattr(spec, side).codec(side, 0, dims, 32, "float32")
        params = jax.tree.map(jnp.asarray, codec.learning.calibrate(rows, slopes))
        body = codec.quantize(params, (), window, TokensAt(positions, prefill=True))
        wanted = codec.vectors(params, codec.dequantize(params, (), body), positions, rope)
        read = variant(0, side, window, positions, rope)
        off = np.abs(np.asarray(read - wanted)) > 1e-3 * np.abs(np.asarray(wanted)).max()
        assert off.any(axis=-1).mean() < 0.05, f"{side}: {off.any(axis=-1).mean():.0%} tokens off"
