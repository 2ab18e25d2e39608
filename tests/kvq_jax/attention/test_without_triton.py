"""A JAX without Pallas's Triton route runs on XLA what Mosaic GPU does not serve, and says why."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[3]

PROGRAM = """
    import sys

    sys.modules["jax.experimental.pallas.triton"] = None  # its import fails

    import numpy as np

    import kvq_jax as kvq
    from kvq_jax.attention import dispatch
    from kvq_jax.cache.cache import CacheDims
    from kvq_jax.cache.update import decode_layer, prefill_layer
    from pallas_kernels.launch import Launch
    from tests.kvq_jax.layer_runs import sequences

    dims = CacheDims(
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_size=256,
    )
    # angles of 2 bits, which Mosaic GPU does not read either
    cache = kvq.init_cache("polarquant:angle_bits=2,radius_bits=2", dims, 1, 256, "bfloat16")
    plan, none = cache.plans[0], np.zeros(1, np.int32)
    tokens = sequences(1, dims, 256, dtype="bfloat16")
    _, state, _ = prefill_layer(plan, (), cache.layers[0], tokens.window(none, none + 200, 200), ())
    new = tokens.window(none + 200, none + 201, 1)
    for implementation in (None, "xla"):
        route = dispatch.choose(implementation, plan, 4, 1)
        out, _, _ = decode_layer(plan, (), state, new, (), route)
        assert np.isfinite(np.asarray(out, np.float32)).all()
    dispatch.no_device = lambda kernels: None  # as if this process had a GPU
    for implementation in ("pallas", Launch(interpret=True)):
        try:
            dispatch.choose(implementation, plan, 4, 1)
        except ValueError as error:
            print(error)
    print(dispatch.unsupported(plan, 4, 1))
    ours = [name for name in sys.modules if name.startswith("pallas_kernels.")]
    kernels = [name for name in ours if name.endswith("kernel")]
    assert not kernels, f"imported although nobody asked for them: {kernels}"
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "models")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_xla_decodes_and_kernels_are_refused_in_one_line_with_the_reason(lines: list[str]):
    by_name, by_launch, reason = lines
    assert reason.startswith(
        "kernels need jax.experimental.pallas.triton, which cannot be imported from JAX "
    )
    assert by_name == f"implementation='pallas' cannot run: {reason}"
    assert by_launch == f"no kernel for this cache: {reason}"
