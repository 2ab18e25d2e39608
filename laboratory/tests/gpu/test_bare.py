"""The GPU benchmarks with nothing but JAX: stand-ins in the place of every other package give the
same model."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax

import kvq_jax as kvq
from benchmarks.gpu.random_model import TINY
from kvq_models.llama.model import abstract_llama

ROOT = pathlib.Path(__file__).parents[3]
# imports of anything but JAX, what JAX needs and the project fail in this process
SCRIPT = """
import sys
import jax, numpy, scipy, opt_einsum

REFUSED = "jaxtyping flax filelock safetensors tqdm transformers tokenizers gguf rich"

class Refused:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in [*REFUSED.split(), "huggingface_hub"]:
            raise ModuleNotFoundError(f"{name} is refused", name=top)

sys.meta_path.insert(0, Refused())
from benchmarks.gpu import bare
assert bare.install() == ["jaxtyping", "flax", "filelock", "safetensors"]
import jax.numpy as jnp
import kvq_jax as kvq
from benchmarks.gpu import attention_candidates, decode_step, kernels, step_parity
from kvq_models.inference.decoding import decode_step as step
llama = decode_step.random_llama(decode_step.TINY)
cache = kvq.init_cache("dense", decode_step.TINY, 2, 256, "bfloat16")
logits, after = jax.jit(step)(llama, cache, jnp.asarray([1, 2]))
assert jnp.isfinite(logits).all()
assert after.lengths.tolist() == [1, 1]
print(kvq.size.nbytes(llama), len(jax.tree.leaves(llama)))
"""


def test_stand_ins_give_the_model_and_its_steps(tmp_path: pathlib.Path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "models")])
    environment = os.environ | {"PYTHONPATH": path, "KVQ_BARE": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    llama = abstract_llama(TINY, "bfloat16")
    assert [int(n) for n in done.stdout.split()] == [
        kvq.size.nbytes(llama),
        len(jax.tree.leaves(llama)),
    ]
