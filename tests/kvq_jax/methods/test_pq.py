"""Product quantization against NumPy that follows its equations, its tables, and its codebooks."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.codecs.codec import Codec
from kvq_jax.methods.pq.codec import LOOKED_UP
from kvq_jax.methods.pq.fit import k_means
from tests.kvq_jax.methods.equations import body_of, read_back

HEADS, TOKENS, H, D = 2, 32, 16, 4
DIMS = kvq.CacheDims(1, 4, HEADS, H, 64)
SPEC = f"pq:code_bits=4,group_size={D},pre_rope=false,sink=0,recent=0,block=32"
# channels of each group: two neighbouring pairs (i, i + H/2)
GROUPS = [[2 * g, 2 * g + 1, H // 2 + 2 * g, H // 2 + 2 * g + 1] for g in range(H // D)]


def gathered(seed: int, tokens: int = TOKENS) -> np.ndarray:
    """Return vectors [K, T, H] around a few places."""
    rng = np.random.default_rng(seed)
    places = 3 * np.random.default_rng(9).normal(size=(HEADS, 12, H))
    chosen = places[:, rng.integers(12, size=tokens)]
    return (chosen + 0.3 * rng.normal(size=chosen.shape)).astype(np.float32)


def learned() -> dict[str, np.ndarray]:
    rows, gradients = gathered(1, 200)[None], gathered(2, 200)[None]
    return kvq.parameters.calibrate(
        SPEC, DIMS, 0, {"k": rows, "v": rows}, {"k": gradients, "v": gradients}
    )["k"]


def test_codes_name_the_codeword_that_the_gradients_find_nearest():
    params = learned()
    codec = kvq.parse(SPEC).layer(0, DIMS, TOKENS, "float32").k
    x, slopes = gathered(3), gathered(2, 200).astype(np.float64)
    read = read_back(codec, params, x)
    wanted, plain = np.empty_like(x), np.empty_like(x)
    for head in range(HEADS):
        for group, channels in enumerate(GROUPS):
            codewords = params["codewords"][head, group].astype(np.float64)
            metric = np.cov(slopes[head][:, channels].T, bias=True)
            metric += np.outer(*2 * [slopes[head][:, channels].mean(axis=0)])
            metric += 1e-3 * np.trace(metric) / D * np.eye(D)
            away = x[head][:, None, channels] - codewords[None]
            far = np.einsum("ted,df,tef->te", away, metric, away)
            wanted[head][:, channels] = codewords[far.argmin(axis=1)]
            plain[head][:, channels] = codewords[np.sum(away**2, axis=-1).argmin(axis=1)]
    np.testing.assert_allclose(read, wanted, atol=1e-6)
    assert np.abs(plain - wanted).max() > 0.1, "the plain distance would pass"


def test_tables_give_the_scores_of_dequantized_keys():
    codec = kvq.parse(SPEC).layer(0, DIMS, TOKENS, "float32").k
    params, body = body_of(codec, learned(), gathered(4))
    positions = jnp.arange(TOKENS)[None]
    q = np.random.default_rng(5).normal(size=(1, HEADS, LOOKED_UP + 1, H)).astype(np.float32)
    few, many = (codec.query(params, (), jnp.asarray(q[:, :, rows:])) for rows in (1, 0))
    assert few.shape == (1, HEADS, LOOKED_UP, H // D, 16), "few rows make a table"
    assert many.shape == q.shape, "many rows stay rows"
    read = np.asarray(codec.dequantize(params, (), body), np.float64)
    exact = np.einsum("bkrh,bkch->bkrc", q, read)
    for query, wanted in ((few, exact[:, :, 1:]), (many, exact)):
        scores = codec.scores(params, (), query, body, positions, None)
        np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-3)
    wrong = Codec.scores(codec, params, (), jnp.asarray(q[:, ::-1]), body, positions, None)
    assert np.abs(wrong - exact).max() > 1, "any keys would pass"


@pytest.mark.parametrize("turned", [False, True])
def test_k_means_finds_the_places_that_a_text_has(turned: bool):
    """16 places far from each other become the codewords, whatever the distance's weights."""
    rng = np.random.default_rng(0)
    places = np.array([[a, b] for a in range(4) for b in range(4)]) * 10.0
    x = places[np.arange(320) % 16] + 0.1 * rng.normal(size=(320, 2))
    root = np.linalg.cholesky([[1.0, 0.5], [0.5, 2.0]]) if turned else np.eye(2)
    codewords = k_means(x, root, 16)
    away = np.linalg.norm(places[:, None] - codewords[None], axis=-1)
    assert away.min(axis=1).max() < 0.2
    with pytest.raises(ValueError, match="1 tokens are too few"):
        kvq.parameters.calibrate(
            "k=pq+v=dense", DIMS, 0, {"k": gathered(1, 1)[None]}, {"k": gathered(1, 1)[None]}
        )


def test_groups_that_cut_a_pair_are_refused():
    with pytest.raises(ValueError, match="group_size=3 must be even"):
        kvq.parse("pq:group_size=3").layer(0, DIMS, TOKENS, "float32")
