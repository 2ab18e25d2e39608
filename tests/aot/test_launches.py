"""A layer of a decode step launches few kernels, whatever the batch, without a loop or branch that
a graph could not capture.
"""

import pytest

from benchmarks.machine_code.launches import limit_us, measure, over_limit
from tests.exhaustive import some
from tests.pallas_kernels.lowering import needs_mosaic

# Beside the projections: queries, keys and values, append and windows, body, merge, a product, and
# twice a sum and a norm.
MAX_LAUNCHES = 10
OUTLIERS = 2  # of keys before the body, and of values after it
# The norm of keys widens until the first block is quantized (kvq_jax/codecs/prompt_statistics.py),
# which takes the largest entries of the new key. At batch 64 XLA also cuts the queries out of the
# projection before two kernels take them, each in a different form.
MORE = {("innerq:bits=2", 16): 1, ("innerq:bits=2", 64): 2}
POLAR = "k=polarquant+v=innerq:bits=4"


# one step of each kind at a batch whose bytes are estimated, and the others' ends
STEPS = [
    *((spec, 16) for spec in ("kivi:bits=4", "innerq:bits=2", "dense", POLAR)),
    *((spec, batch) for spec in ("kivi:bits=4", "kvquant:bits=4") for batch in (1, 64)),
    ("innerq:bits=2", 64),
]
USUAL = ("kivi:bits=4", 16), ("dense", 16), ("innerq:bits=2", 16), ("kvquant:bits=4", 64)


@pytest.mark.parametrize(("spec", "batch"), some(STEPS, USUAL))
def test_a_layer_launches_few_kernels_at_any_batch(spec: str, batch: int):
    row = measure(spec, batch)
    assert (row.loops, row.branches) == (0, 0), f"{row.loops} loops, {row.branches} branches"
    assert row.matrices == 5, f"{row.matrices} products of matrices: {row.launches}"
    maximum = MAX_LAUNCHES + MORE.get((spec, batch), OUTLIERS if spec == "kvquant:bits=4" else 0)
    assert row.total - row.matrices <= maximum, f"{row.total} launches: {row.launches}"
    assert row.launches["decode_attention"] == 1
    # estimated: close to the time of the cache's bytes
    if batch == 16 and spec != POLAR:
        for tokens, maximum in ((32768, 1.6), (4096, 2.5)):
            assert over_limit(row.beside, limit_us(spec, batch, tokens)) < maximum, (
                f"{tokens} tokens"
            )
    graphs = row.graphs, row.outside
    assert graphs == (1, 0), f"{row.graphs} command buffers, {row.outside} launches in none"
    if spec == "kvquant:bits=4":
        # Scores come before the attention kernel, values after it. At 64, all heads' scores fill
        # 256 MiB.
        once = "append_token", "outlier_scores", "decode_attention", "outlier_values"
        assert [row.launches[name] for name in once] == [1, 1, 1, 1], f"{row.launches}"
        assert not any("scatter" in name for name in row.launches), f"{row.launches}"


@needs_mosaic
@pytest.mark.parametrize(
    ("spec", "batch"),
    some(
        [
            *((spec, batch) for spec in ("kivi:bits=4", "dense") for batch in (1, 16, 64)),
            *((spec, 16) for spec in ("innerq:bits=2", "nf4", "kvquant:bits=4", POLAR)),
        ],
        [("kivi:bits=4", 16)],
    ),
)
def test_a_layer_on_mosaic_gpu_launches_as_few(spec: str, batch: int):
    row = measure(spec, batch, route="mosaic")
    assert (row.loops, row.branches) == (0, 0), f"{row.loops} loops, {row.branches} branches"
    assert (row.graphs, row.outside) == (1, 0), f"{row.outside} launches outside of a graph"
    sparse = spec == "kvquant:bits=4"
    maximum = MAX_LAUNCHES + (OUTLIERS if sparse else MORE.get((spec, batch), 0))
    assert row.beside <= maximum, f"{row.launches}"
    outliers = ("outlier_scores", "outlier_values") if sparse else ()
    for kernel in ("append_token", "decode_attention", "merge", *outliers):
        assert row.launches[kernel] == 1, f"{row.launches}"
