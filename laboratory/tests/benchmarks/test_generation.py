"""The benchmark of kvq beside transformers: who steps when, what is decoded, and the page. That of
transformers itself is not run here."""

from __future__ import annotations

import pathlib

import gguf
import jax
import numpy as np

import kvq_jax as kvq
from benchmarks.cpu.generation import ours
from benchmarks.cpu.llama_cpp_steps import write_float32
from kvq_models import generate, load_llama, prepare
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import byte_level, write_gguf


def test_kvqs_steps_are_those_of_generate():
    llama, prompt = random_llama(tiny_config(num_hidden_layers=1)), np.arange(40, dtype=np.int32)
    step = ours(llama, "kivi:bits=2", prompt, 3)
    tokens = [int(np.asarray(step())[0]) for _ in range(3)]
    cache = kvq.init_cache("kivi:bits=2", llama.config, 1, 64, "float32")
    expected = np.asarray(
        generate(prepare(llama, "kivi:bits=2"), cache, prompt[None], max_new_tokens=4).tokens
    )[0]
    assert tokens == expected[1:4].tolist(), "the first token comes with the prompt"


def test_llama_cpp_reads_the_weights_and_the_tokenizer_of_the_file_that_kvq_reads(
    tmp_path: pathlib.Path,
):
    llama = random_llama(tiny_config(num_hidden_layers=1))
    source = write_gguf(
        llama, tmp_path / "source.gguf", kind="Q8_0", tokenizer=byte_level(pre="smollm")
    )
    write_float32(source, tmp_path / "written.gguf")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "written.gguf")
    assert {tensor.tensor_type.name for tensor in before.tensors} == {
        "Q8_0",
        "F32",
    }, "the test needs quantized weights"
    assert {tensor.tensor_type.name for tensor in after.tensors} == {"F32"}
    for name in before.fields:
        if not name.startswith("GGUF."):
            assert after.fields[name].contents() == before.fields[name].contents(), name
    wanted, found = (
        jax.tree.leaves(load_llama(file, dtype="float32", weights="dense")[0])
        for file in (source, tmp_path / "written.gguf")
    )
    given = jax.tree.leaves(llama)
    for want, have, exact in zip(wanted, found, given, strict=True):
        np.testing.assert_array_equal(have, want)
        assert have.ndim < 2 or np.any(have != exact), "weights that were never quantized"
