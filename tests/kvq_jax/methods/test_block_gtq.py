"""Block-GTQ against NumPy that follows its equations: energies, widths, groups."""

import dataclasses
import itertools

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.reverse_water_filling import allocate
from kvq_jax.arrays.rotations import rotation
from kvq_jax.codecs.codec import Side
from kvq_jax.methods.block_gtq.method import ERRORS
from kvq_jax.methods.turboquant.levels import sphere_levels
from tests.kvq_jax.methods.equations import assert_nearly_all_agree, read_back

HEADS, TOKENS, H = 2, 32, 16
DIMS = kvq.CacheDims(1, 4, HEADS, H, 64)
SPEC = "block_gtq:k_widths=5311,v_bits=2,scale_dtype=float32,sink=0,recent=0,block=32"


def uneven(seed: int, heads: int) -> np.ndarray:
    """Return vectors [heads, T, H] of very different variances in their channels."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(size=(heads, 1, H)))
    return (rng.normal(size=(heads, TOKENS, H)) * size).astype(np.float32)


def learned(keys: np.ndarray, queries: np.ndarray) -> dict[str, np.ndarray]:
    rows: dict[Side, np.ndarray] = {"k": keys[None], "v": keys[None]}
    ones: dict[Side, np.ndarray] = {"k": np.ones_like(keys)[None]}
    return kvq.parameters.calibrate(SPEC, DIMS, 0, rows, ones, queries[None])["k"]


def energies_of(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return (E |q_i|^2 + E |k_i|^2) / 2 of each pair of each head."""
    energies = np.empty((HEADS, H // 2))
    for head, i in itertools.product(range(HEADS), range(H // 2)):
        pair = [i, i + H // 2]
        of_keys = [float(k[pair] @ k[pair]) for k in keys[head]]
        readers = queries[2 * head : 2 * head + 2].reshape(-1, H)  # two query heads read a head
        energies[head, i] = (np.mean([q[pair] @ q[pair] for q in readers]) + np.mean(of_keys)) / 2
    return energies


def turbo(x: np.ndarray, bits: int) -> np.ndarray:
    """Return what rows [T, d] read as: directions rounded in a rotated basis, norms kept."""
    r, levels = rotation(x.shape[1]).astype(np.float64), np.asarray(sphere_levels(bits, x.shape[1]))
    read = np.empty_like(x)
    for t, row in enumerate(x):
        y = r @ row / np.linalg.norm(row)
        rounded = levels[np.abs(y[:, None] - levels).argmin(axis=1)]
        read[t] = r.T @ rounded * np.linalg.norm(row) / np.linalg.norm(rounded)
    return read


@pytest.mark.parametrize("side", ["k", "v"])
def test_energies_and_groups_are_what_the_equations_say(side: Side):
    keys, queries = uneven(1, HEADS), uneven(2, 2 * HEADS)
    params = learned(keys, queries)
    energies = energies_of(keys, queries)
    np.testing.assert_allclose(params["energies"], -np.sort(-energies), rtol=1e-5)
    assert np.abs(params["energies"] / -np.sort(-energies_of(keys, 0 * queries)) - 1).max() > 0.1

    codec = getattr(kvq.parse(SPEC).layer(0, DIMS, TOKENS, "float32"), side)
    x = uneven(3, HEADS)
    read = read_back(codec, params if side == "k" else {}, x)
    wanted = np.empty(x.shape)
    for head in range(HEADS):
        ranked = np.argsort(-energies[head])
        groups = [(5, ranked[:2]), (3, ranked[2:4]), (1, ranked[4:])]
        for bits, pairs in groups if side == "k" else [(2, np.arange(H // 2))]:
            both = [pairs, pairs + H // 2]
            channels = np.stack(both, axis=1).ravel() if side == "k" else np.concatenate(both)
            wanted[head][:, channels] = turbo(x[head][:, channels].astype(np.float64), bits)
    assert_nearly_all_agree(read, wanted, 1e-4 * np.abs(x).max())
    assert np.abs(wanted - x).max() > 0.1, "exact rows would pass"


def test_widths_are_the_best_of_all():
    """No other widths from 1 to 8 of the same sum have a smaller sum of energy * 4^-b."""
    energies = np.array([90.0, 20.0, 3.0, 0.2])
    widths = allocate(energies, 12, ERRORS, 1)
    costs = {
        other: float(energies @ 4.0 ** -np.array(other))
        for other in itertools.product(range(1, 9), repeat=4)
        if sum(other) == 12
    }
    assert costs[tuple(map(int, widths))] == min(costs.values())
    assert tuple(map(int, widths)) == (5, 4, 2, 1), widths


def test_keys_of_large_pairs_get_more_bits_and_err_less():
    """A calibration resolves `bits` to widths, and scores of queries like its own err less than
    with one width for all pairs."""
    keys, queries = uneven(1, HEADS), uneven(2, 2 * HEADS)
    params, spec = learned(keys, queries), "block_gtq:bits=2,scale_dtype=float32,block=32"
    fitted = kvq.parse(spec).k.fitted({"k": [params]}, DIMS)
    widths = str(dataclasses.asdict(fitted)["k_widths"])
    assert sum(map(int, widths)) == 8, widths
    assert widths != "2222", "one width for all pairs"
    errors = []
    for text in (f"{spec},k_widths={widths}", f"{spec},k_widths=2222"):
        codec = kvq.parse(text).layer(0, DIMS, TOKENS, "float32").k
        away = np.repeat(read_back(codec, params, keys) - keys, 2, axis=0)
        errors.append(np.abs(np.einsum("nth,nsh->nts", queries, away)).mean())
    assert errors[0] < 0.9 * errors[1], errors


@pytest.mark.parametrize(("head_dim", "digits"), [(64, 16), (128, 32), (256, 32)])
def test_widths_of_a_calibration_also_describe_head_dim_128(head_dim: int, digits: int):
    """The protocol counts a model's cache at the head dim of an 8B model."""
    method = kvq.parse("block_gtq:bits=2").k
    energies = np.geomspace(100, 0.1, head_dim // 2, dtype=np.float32)[None]
    fitted = method.fitted({"k": [{"energies": energies}]}, kvq.CacheDims(1, 1, 1, head_dim, 64))
    widths = str(dataclasses.asdict(fitted)["k_widths"])
    assert len(widths) == digits, widths
    assert sum(map(int, widths)) == 2 * digits, widths
    counted = kvq.parse(f"block_gtq:k_widths={widths},v_bits=2")
    assert kvq.size.of(counted, kvq.CacheDims(1, 1, 1, 128, 64), 1, 64).resident


def test_missing_queries_are_named():
    rows: dict[Side, np.ndarray] = {"k": uneven(1, HEADS)[None]}
    with pytest.raises(ValueError, match=r"fitted to the queries of layer 0: give queries="):
        kvq.parameters.calibrate("k=block_gtq+v=dense", DIMS, 0, rows, rows)
    with pytest.raises(ValueError, match=r"queries must be \[B, 4, T, 16\]"):
        kvq.parameters.calibrate("k=block_gtq+v=dense", DIMS, 0, rows, rows, rows["k"])
