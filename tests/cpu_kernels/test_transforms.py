"""The C++ kernel in several threads, and in a forked process."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import attention, library
from tests.cpu_kernels.random_bodies import BodyCase

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)

K, V, CAPACITY = (
    BodyCase(4, 64, 32, "token groups", 32),
    BodyCase(4, 64, 32, "channel groups", 32),
    4096,
)
FULL = np.full((2, 1), 2048, np.int32)


def arrays(seed: int = 0):
    q = np.random.default_rng(seed).normal(size=(2, 2, 4, 64)).astype(np.float32)
    return jax.tree.map(
        jnp.asarray, (q, K.random(2, 2, CAPACITY, seed)[0], V.random(2, 2, CAPACITY, seed + 1)[0])
    )


def attend(q, keys, values, limits):
    m, l, o = attention.decode_attention(
        q, (K.body, keys), (V.body, values), limits, capacity=CAPACITY
    )
    return o / l


def test_threads_at_once_get_what_each_would_alone():
    step = jax.jit(attend)
    jobs = [(*arrays(seed), jnp.asarray([[CAPACITY], [40 * seed + 1]])) for seed in range(6)]
    alone = [np.asarray(step(*job)) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda job: [np.asarray(step(*job)) for _ in range(8)], jobs))
    for one, many in zip(alone, together, strict=True):
        for other in many:
            np.testing.assert_array_equal(one, other)
    assert np.abs(alone[0] - alone[1]).max() > 1e-3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_of_a_process_that_loaded_it_runs_it(tmp_path: pathlib.Path):
    """JAX itself must not run before a fork, but loading and registering the library may."""
    program = """
        import os
        from cpu_kernels import library
        assert library.unavailable() is None and library.instruction_set()
        child = os.fork()
        if child == 0:
            import sys
            import numpy as np
            from tests.cpu_kernels.test_transforms import FULL, arrays, attend
            np.save(sys.argv[1], attend(*arrays(), FULL))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        textwrap.dedent(program),
        str(tmp_path / "out.npy"),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = np.asarray(attend(*arrays(), jnp.asarray(FULL)))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    assert np.abs(expected).max() > 1e-3
