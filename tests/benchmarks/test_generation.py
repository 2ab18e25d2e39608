"""The benchmark of kvq beside transformers: who steps when, what is decoded, and the page. That of
transformers itself is not run here."""

from __future__ import annotations

import pathlib

import gguf
import jax
import numpy as np

import kvq_jax as kvq
from benchmarks.cpu.generation import GenerationReport, GenerationRow, ours, page, timed
from benchmarks.cpu.llama_cpp_steps import write_float32
from benchmarks.report_file import header
from kvq_models import generate, load_llama, prepare
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import byte_level, write_gguf


def test_ways_take_turns_and_the_first_step_does_not_count():
    calls: list[str] = []
    rows = list(timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 7, 3))
    assert "".join(calls) == "abababab"
    assert [(row.way, row.prompt, len(row.samples_ms)) for row in rows] == [
        ("a", 7, 3),
        ("b", 7, 3),
    ]


def test_kvqs_steps_are_those_of_generate():
    llama, prompt = random_llama(tiny_config(num_hidden_layers=1)), np.arange(40, dtype=np.int32)
    step = ours(llama, "kivi:bits=2", prompt, 3)
    tokens = [int(np.asarray(step())[0]) for _ in range(3)]
    cache = kvq.init_cache("kivi:bits=2", llama.config, 1, 64, "float32")
    expected = np.asarray(
        generate(prepare(llama, "kivi:bits=2"), cache, prompt[None], max_new_tokens=4).tokens
    )[0]
    assert tokens == expected[1:4].tolist(), "the first token comes with the prompt"


def test_the_page_tells_ratios_to_the_first_cache_and_what_is_missing(tmp_path: pathlib.Path):
    rows = (
        GenerationRow("kvq, dense", 9, (10.0, 30.0)),
        GenerationRow("kvq, kivi:bits=2", 9, (10.0, 10.0)),
    )
    versions = {"model": "m", "transformers": "5", "torch": "2", "llama_cpp": "0.3", "cores": 2}
    report = GenerationReport(title="T", **header(("x",)), **versions, missing=("hqq",), rows=rows)
    report.write(tmp_path / "generation.json")
    assert GenerationReport.read(tmp_path / "generation.json") == report
    text = page(report, tmp_path / "generation.json")
    assert "| 9 | kvq, kivi:bits=2 | 100.0 | 2.00 | 10.0 |" in text
    assert "Not installed, so not measured: hqq." in text


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
