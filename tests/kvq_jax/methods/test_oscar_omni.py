"""OScaR against NumPy that follows its equations group by group."""

import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.arrays.rotations import rotation
from tests.kvq_jax.methods.equations import assert_nearly_all_agree, rounded

GROUP, HEAD_DIM = 16, 16


def keys_by_norm(turned: np.ndarray, over: tuple[int, ...]) -> np.ndarray:
    """Return keys [K, S, H] as they are read, with norms of tokens over the axes `over`."""
    norm = np.linalg.norm(turned, axis=over, keepdims=True) if over else 1.0
    return rounded(turned / np.where(norm == 0, 1, norm), axis=1, group=GROUP) * norm


def test_the_body_is_what_the_equations_say():
    """Tokens of very different norms, one of zeros: these are what the norm is for."""
    rng, matrix = np.random.default_rng(4), rotation(HEAD_DIM)
    k, v = (
        rng.normal(size=(1, 2, 32, HEAD_DIM)) * np.exp(2 * rng.normal(size=(1, 2, 32, 1)))
        for _ in range(2)
    )
    k[:, :, 5] = 0
    spec = f"oscar_omni:group_size={GROUP},scale_dtype=float32,block=32"
    found = kvq.roundtrip(spec, *map(jnp.float32, (k, v)), layout="BNTH")
    read_k, read_v = (np.asarray(x)[0] for x in found)
    turned = k[0] @ matrix.T
    by_norm, by_head, plain = (keys_by_norm(turned, over) @ matrix for over in ((0, 2), (2,), ()))
    wanted = {"k": by_norm, "v": rounded(v[0] @ matrix.T, axis=2) @ matrix}
    for side, read in (("k", read_k), ("v", read_v)):
        assert_nearly_all_agree(read, wanted[side], 1e-4 * np.abs(wanted[side]).max())
    assert np.abs(by_norm - by_head).max() > 0.1, "a norm of each head would pass"
    assert np.abs(read_k[:, 5]).max() < 1e-6, "a token of zeros is not read as one"
    small = np.linalg.norm(k[0], axis=(0, 2)) < 5
    errors = [np.linalg.norm((x - k[0])[:, small]) for x in (read_k, plain)]
    assert errors[0] < errors[1] / 2, "small tokens beside large ones are read no better"
