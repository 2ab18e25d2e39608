"""Rows of any size: what is stored of scales has two ends, and `kvq.size.overflowed` tells of
both."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.codecs.codec import Codec, TokensAt
from kvq_jax.codecs.rotating import MAX_ENTRY
from kvq_jax.methods.waterfill.codec import RotatedValueCodec
from tests.kvq_jax.codecs.test_codec_laws import error, quantizing_codecs
from tests.kvq_jax.layer_runs import quick_jit
from tests.methods_table import MethodCase, cases

SIZES = 10.0 ** np.array([-30, -12, -8, -7, -6, -5, -4, -2, 0, 2, 3, 5, 12, 30])
TOLD = SIZES >= 1e-7  # smaller rows are read as zeros, and stored like them
MIN_SCALE = 2.0**-24  # of a float16
STEPS = 4  # of these that an entry may be off besides, in the mean of squares


@functools.partial(quick_jit, static_argnums=0)
def decoded(codec: Codec, params: Any, inputs: kvq.types.LayerInputs, rows: Any) -> Any:
    """Return the decoded rows, and whether some of them met the large and the small end."""
    stats = codec.statistics.of(params, inputs)
    at = TokensAt(inputs.positions[:, : rows.shape[2]], prefill=True)
    body = codec.quantize(params, stats, rows, at)
    arrays = jax.tree.leaves(body, is_leaf=lambda node: hasattr(node, "out_of_range"))
    ends = [array.out_of_range() for array in arrays if hasattr(array, "out_of_range")]
    told = [[jnp.any(end) for end in found] for found in ends if found is not None]
    return codec.dequantize(params, stats, body), told


def scaled(inputs: kvq.types.LayerInputs, size: float) -> kvq.types.LayerInputs:
    names = ("x", "k_pre", "k_rot", "v")
    return dataclasses.replace(inputs, **{name: getattr(inputs, name) * size for name in names})


def unseen(case: MethodCase) -> np.ndarray:
    """Return the sizes of which `overflowed` says that it does not see them."""
    if "grid=global" in case.spec:
        return SIZES > 1e3
    rotated = any(name in case.spec for name in ("turboquant", "kvarn", "block_gtq"))
    return (SIZES > MAX_ENTRY) & (rotated and "scale_dtype=float32" in case.spec)


@cases()
def test_rows_of_any_size_are_read_as_well_as_their_scales_can_be_stored(case: MethodCase):
    for plan, codec, params, inputs, rows in quantizing_codecs(case):
        errors, told, means = [], [], []
        for size in SIZES.astype(np.float32):
            read, ends = decoded(codec, params, scaled(inputs, size), rows * size)
            exact = np.asarray(rows, np.float64) * float(size)
            assert np.isfinite(read).all(), f"rows of {size:.0e} decode to what is not finite"
            errors.append(error(np.asarray(read, np.float64), exact))
            told.append(any(bool(end) for found in ends for end in found))
            means.append(np.sqrt((exact**2).mean()))
        found, usual = np.array(errors), errors[int(np.argmin(np.abs(SIZES - 1)))]
        shown = "; ".join(
            f"{size:.0e}: {e:.2g} {t}" for size, e, t in zip(SIZES, found, told, strict=True)
        )
        wrong = (found > np.maximum(2 * usual, usual + 0.1)) & ~unseen(case)
        if codec.learning.parameters(plan.heads) or "subtract_bias" in case.spec:
            # Its parameters are those of rows of one size. What it stores of larger ones is known,
            # if scales follow them at all.
            if found[SIZES == 1e2] <= 1.2 * usual:
                assert (np.array(told) >= wrong)[SIZES > 1].all(), f"not told of: {shown}"
            continue
        if isinstance(codec, RotatedValueCodec):  # its README: read as rows of 1.5e-5
            found[SIZES < 1e-4] = 0
        if "nvfp4:scale=none" in case.spec:  # scales of E4M3 alone, from 0.002 to 448
            found[(SIZES < 1) | (SIZES > 1e2)], wrong[SIZES < 1e-2] = 0, False
        maximum = np.where(
            SIZES > 1e3, 1.2, np.minimum(1.2, 1.2 * usual + STEPS * MIN_SCALE / np.array(means))
        )
        assert (found <= maximum).all(), shown
        assert (np.array(told) >= wrong)[TOLD].all(), f"not told of: {shown}"
        assert not np.array(told)[(SIZES >= 1e-2) & (SIZES <= 1e2)].any(), (
            f"told for nothing: {shown}"
        )


def test_saturated_tokens_of_the_body_are_named():
    """A value of 9e4 fits bfloat16 and no float16 scale; small values fit neither."""
    dims = kvq.CacheDims(1, 2, 2, 32, 64)
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 2, 64, 32)) for i in range(3))
    v = v.at[0, 0, 3, 5].set(9e4)
    k = k.at[1].multiply(2e-8)
    separate = {(0, "v", "large"), (1, "k", "small")}
    for spec, expected in {
        "kivi:recent=8,block=16": separate,
        "int8:recent=8,block=8": separate,
        "gear:recent=8,block=16": separate,
        "gear:rank=0,recent=8,block=16": separate,
        "zipcache:recent=8,block=16": {(0, "kv", "large"), (1, "kv", "small")},
        "fp8:recent=8,block=8": set(),
    }.items():
        cache = kvq.init_cache(spec, dims, 2, 80, "float32")
        _, step = kvq.append_and_attend(kvq.begin(cache, 64, prefill=True), q, k, v)
        cache = kvq.finish(step)
        told = {(o.row, o.side, o.end) for o in kvq.size.overflowed(cache)}
        assert told == expected, f"{spec}: {told}"
        assert not kvq.size.overflowed(kvq.rows.trim(cache, [8, 0])), "dropped tokens are told of"


def test_numbers_beyond_the_largest_that_is_written_are_named():
    """A scale of MXFP4 reaches to 2^127, but rows are limited to 2^100."""
    dims = kvq.CacheDims(1, 2, 2, 32, 64)
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 2, 64, 32)) for i in range(3))
    for size, expected in ((1e35, {(0, "k", "large")}), (1e29, set())):
        cache = kvq.init_cache("mxfp4:recent=8,block=8", dims, 2, 80, "float32")
        step = kvq.begin(cache, 64, prefill=True)
        _, step = kvq.append_and_attend(step, q, k.at[0, 0, 3, 5].set(size), v)
        told = {(o.row, o.side, o.end) for o in kvq.size.overflowed(kvq.finish(step))}
        assert told == expected, f"{size}: {told}"
