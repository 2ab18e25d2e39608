"""Decode steps of llama.cpp for `benchmarks.cpu.generation`, with weights in fp32 as there."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
from typing import Any

import gguf
import numpy as np

from benchmarks.report_file import cores

PACKAGE = "llama-cpp-python"
CACHES = {"f16": gguf.GGMLQuantizationType.F16, "q4_0": gguf.GGMLQuantizationType.Q4_0}


def version() -> str | None:
    """Return the version of the package that brings llama.cpp, or None if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_float32(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write a GGUF file again with every tensor dequantized to fp32, and the metadata as it was."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    written_by_itself = {"general.architecture", "general.file_type"}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in written_by_itself:
            continue
        [kind, *of_entries] = field.types
        writer.add_key_value(name, field.contents(), kind, of_entries[-1] if of_entries else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Steps:
    """llama.cpp after a prompt, by flash attention, which quantized values need. Each call
    generates one more token, greedily."""

    def __init__(self, file: pathlib.Path, prompt: np.ndarray, steps: int, cache: str):
        llama_cpp: Any = importlib.import_module("llama_cpp")
        kind, threads = int(CACHES[cache]), cores()
        self.llama = llama_cpp.Llama(
            str(file),
            n_ctx=len(prompt) + steps + 2,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=kind,
            type_v=kind,
            flash_attn=True,
            verbose=False,
        )
        self._logits = llama_cpp.llama_get_logits_ith
        self.token = self._after(prompt.tolist())

    def __call__(self) -> int:
        self.token = self._after([self.token])
        return self.token

    def _after(self, tokens: list[int]) -> int:
        self.llama.eval(tokens)
        return int(
            np.ctypeslib.as_array(
                self._logits(self.llama.ctx, -1), shape=(self.llama.n_vocab(),)
            ).argmax()
        )
