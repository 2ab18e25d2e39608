"""KIVI and InnerQ against what their public implementations return for the same numbers (slices in
tests/golden/).

Codes may be off by one in 1e-4 of the entries (rounding ties); decoded numbers agree to 1e-5
elsewhere. InnerQ's public code counts the sign of symmetric and hybrid codes: its b is our bits +
1.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupFormat

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


@functools.partial(jax.jit, static_argnums=1)
def round_trip(x, format: GroupFormat):
    body = grouped_array.quantize(x, format)
    return body, grouped_array.codes(body), grouped_array.dequantize(body)


def compare_codes(found, expected) -> None:
    off = np.abs(np.asarray(found, np.int64) - np.asarray(expected, np.int64))
    assert off.max() <= 1, f"a code is off by {off.max()}"
    assert (off > 0).mean() <= 1e-4, f"{(off > 0).sum()} of {off.size} codes are off by one"


def compare_numbers(found, expected) -> None:
    error = np.abs(np.asarray(found, np.float64) - expected) / np.maximum(1, np.abs(expected))
    assert (error > 1e-5).mean() <= 1e-4, (
        f"{(error > 1e-5).sum()} of {error.size} numbers differ, by up to {error.max():.1e}"
    )


def format_of(side: str, bits: int, scheme: str, kind: str, tokens: int) -> GroupFormat:
    axis = "channels" if (side == "k") == (kind == "innerq") else "tokens"
    return GroupFormat(bits, scheme, axis, 32, 64, 32 if tokens % 32 == 0 else 1, "float32")


@pytest.mark.parametrize("side", ["k", "v"])
def test_kivi_matches_its_public_code(side: str):
    data = golden("kivi_b2_f32")
    x = data[side.upper()]
    body, codes, x_hat = round_trip(jnp.asarray(x), format_of(side, 2, "asym", "kivi", x.shape[2]))
    compare_codes(codes, data[f"{side}_codes"])
    scale, zero = data[f"{side}_scale"], data[f"{side}_mn"]
    if side == "k":
        scale, zero = scale[:, :, :, 0], zero[:, :, :, 0]
    else:
        scale, zero = (np.swapaxes(a[..., 0], 2, 3) for a in (scale, zero))
    np.testing.assert_allclose(body.scale, scale, rtol=1e-6)
    np.testing.assert_allclose(body.zero, zero, rtol=1e-6)
    compare_numbers(x_hat, data[f"{side}_deq"])


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("paper_bits", [1, 2])
@pytest.mark.parametrize("scheme", ["sym", "asym", "hybrid"])
def test_innerq_matches_its_public_code(side: str, paper_bits: int, scheme: str):
    data = golden("innerq_quant")
    b = paper_bits + 1  # of the public code; its asym has no sign
    bits = b if scheme == "asym" else paper_bits
    x = data[side.upper()]
    body, codes, x_hat = round_trip(
        jnp.asarray(x), format_of(side, bits, scheme, "innerq", x.shape[2])
    )
    name = f"{side}_{'hyb' if scheme == 'hybrid' else scheme}_b{b}"
    compare_numbers(x_hat, data[f"{name}_deq"])
    if scheme == "asym":
        compare_codes(codes, data[f"{name}_codes"])
    if scheme == "sym":
        magnitude = np.asarray(codes, np.int64) - body.format.centre
        signs = np.sign(data[f"{name}_signs"].astype(np.int64))
        compare_codes(magnitude, data[f"{name}_codes"] * np.where(signs == 0, 1, signs))
    if scheme == "hybrid":
        chose_sym = (
            np.abs(np.asarray(body.zero) + body.format.centre * np.asarray(body.scale)) < 1e-6
        )
        stored = (
            np.swapaxes(data[f"{name}_mask_sym"], 2, 3) if side == "k" else data[f"{name}_mask_sym"]
        )
        assert (chose_sym != stored).mean() <= 1e-2, (
            f"{(chose_sym != stored).sum()} groups chose the other scheme"
        )


def test_innerq_cache_matches_its_public_code():
    """Numbers inside the quantized regions, not where these end. Keys: sym, 2 bits and a sign;
    values: hybrid, 1 bit and a sign."""
    data = golden("innerq_cache_innerq_hybrid")
    trace = data["trace_ksink_kq_krecent_vsink_vq_vrecent"]
    k_sink, k_tokens, _, v_sink, v_tokens, _ = (int(n) for n in trace[-1])
    prompt_tokens = int(trace[0][1])

    prompt = data["K"][:, :, k_sink : k_sink + prompt_tokens]
    np.testing.assert_allclose(
        np.sqrt(np.abs(prompt).max(axis=2, keepdims=True)), data["key_norm"], rtol=1e-6
    )
    keys = data["K"][:, :, k_sink : k_sink + k_tokens] / data["key_norm"]
    _, _, k_hat = round_trip(
        jnp.asarray(keys), GroupFormat(2, "sym", "channels", 32, 64, 1, "float32")
    )
    compare_numbers(
        np.asarray(k_hat) * data["key_norm"], data["k_deq_final"][:, :, k_sink : k_sink + k_tokens]
    )

    values = data["V"][:, :, v_sink : v_sink + v_tokens]
    _, _, v_hat = round_trip(
        jnp.asarray(values), GroupFormat(1, "hybrid", "tokens", 32, 64, 32, "float32")
    )
    compare_numbers(v_hat, data["v_deq_final"][:, :, v_sink : v_sink + v_tokens])


def test_the_comparison_rejects_other_numbers():
    data = golden("kivi_b2_f32")
    with pytest.raises(AssertionError):
        compare_numbers(np.roll(data["k_deq"], 1, axis=2), data["k_deq"])
    with pytest.raises(AssertionError):
        compare_codes((data["k_codes"] + (np.arange(64) == 0)) % 4, data["k_codes"])
