"""Plans of models with sliding windows: a bit counts as often as a layer keeps tokens."""

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.layer.attention import Attention
from kvq_models.calibration.file import Calibration, Origin
from kvq_tools.planning.defaults import SCORED
from kvq_tools.planning.request import PlanRequest
from kvq_tools.planning.unmeasured import planned, stored_tokens

WINDOWS = (None, 256, 256, None, 256, 256)
SIZES = {
    "num_hidden_layers": len(WINDOWS),
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_size": 128,
}
LAYERS = tuple(Attention(window=window) for window in WINDOWS)
CONFIG = kvq.CacheDims(**SIZES, attention=LAYERS)
PLAIN = kvq.CacheDims(**SIZES)
CONTEXT = 8192


def calibration() -> Calibration:
    """Return energies that are the same in all layers, the strongest channels first."""
    energies = np.exp(-np.arange(64) / 8).astype(np.float32)[None]
    tensors = {
        f"layers.{layer}.{side}.energies": energies[:, :: 2 if side == "k" else 1]
        for layer in range(len(WINDOWS))
        for side in "kv"
    }
    keys = {name.removesuffix(".energies"): "" for name in tensors}
    origin = Origin("text", "", 1, 128, 0, "float32", 1.0)
    return Calibration("waterfill", CONFIG, "", keys, origin, tensors)


def bits_of_layers(spec: CacheSpec) -> list[int]:
    widths = [spec.k.widths(side, i, CONFIG) for i in range(len(WINDOWS)) for side in "kv"]
    return [sum(widths[2 * i]) + sum(widths[2 * i + 1]) for i in range(len(WINDOWS))]


@pytest.mark.parametrize("bits", [2.0, 3.0])
def test_windowed_layers_get_more_bits_within_the_same_bytes(bits: float):
    spec = planned(kvq.parse(f"waterfill:bits={bits}"), calibration(), CONFIG, CONTEXT)
    shares = bits_of_layers(spec)
    windowed = [share for share, window in zip(shares, WINDOWS, strict=True) if window]
    full = [share for share, window in zip(shares, WINDOWS, strict=True) if not window]
    assert min(windowed) > max(full)
    assert kvq.size.body_bits_per_element(spec, CONFIG, CONTEXT) <= bits
    equal = kvq.cache.layout(f"waterfill:bits={bits}", CONFIG, 1, CONTEXT)
    assert kvq.size.nbytes(kvq.cache.layout(spec, CONFIG, 1, CONTEXT)) <= kvq.size.nbytes(equal)
    # over all layers alike, it would have more
    assert kvq.size.body_bits_per_element(spec, CONFIG) > bits


@pytest.mark.parametrize(("config", "context"), [(PLAIN, CONTEXT), (CONFIG, 256)])
def test_layers_that_keep_as_many_tokens_share_alike(config: kvq.CacheDims, context: int):
    assert set(stored_tokens(config, context)) == {1}
    spec = planned(kvq.parse("waterfill:bits=3"), calibration(), config, context)
    assert len(set(bits_of_layers(spec))) == 1
    assert kvq.size.body_bits_per_element(spec, config, context) == pytest.approx(
        kvq.size.body_bits_per_element(spec, config)
    )


@pytest.mark.parametrize("windows", ["recent=32", "recent=32,block=128"])
def test_the_windows_of_a_spec_stay_and_a_bit_counts_by_the_tokens_that_they_leave(windows: str):
    equal = kvq.parse(f"waterfill:bits=3,{windows}")
    spec = planned(equal, calibration(), CONFIG, CONTEXT)
    assert (spec.recent, spec.block) == (equal.recent, equal.block)
    ours, others = (kvq.size.of(cache, CONFIG, 1, CONTEXT).resident for cache in (spec, equal))
    assert 0.99 * others < ours <= others


def test_windows_of_a_text_leave_something_to_quantize_in_layers_with_a_sink_too():
    minimum = 32 + 96 + 32 + SCORED  # sink, recent and block of a layer without a window
    layers = (Attention(window=256), Attention())
    config = kvq.CacheDims(**SIZES | {"num_hidden_layers": 2}, attention=layers)
    ids = np.zeros(8192, np.int32)
    PlanRequest(ids, ids, minimum, minimum, 1, 1, 64).check(config)
    with pytest.raises(
        ValueError, match=rf"windows of {minimum - 1} tokens leave .* at least {minimum}"
    ):
        PlanRequest(ids, ids, minimum - 1, minimum - 1, 1, 1, 64).check(config)
