"""Measure llama.cpp. The way is the type of its cache, f16, q8_0 or q4_0, with its flash attention,
which quantized values need. The way `f16, two products` does without."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from benchmarks.cpu.request.child import Request, measured_by, request_times

TWO_PRODUCTS = ", two products"
KINDS = {"f16": 1, "q4_0": 2, "q8_0": 8}  # of ggml's types


def measure(request: Request) -> dict[str, Any]:
    llama_cpp: Any = importlib.import_module("llama_cpp")
    version = importlib.metadata.version("llama-cpp-python")
    instructions = llama_cpp.llama_print_system_info().decode()
    ids = request.prompt_ids()
    kind = KINDS[request.way.removesuffix(TWO_PRODUCTS)]
    llama = llama_cpp.Llama(
        request.model,
        n_ctx=len(ids) + request.steps + 8,
        n_batch=512,
        n_threads=request.cores,
        n_threads_batch=request.cores,
        type_k=kind,
        type_v=kind,
        flash_attn=not request.way.endswith(TWO_PRODUCTS),
        verbose=False,
    )
    if request.warm:
        return {}
    numpy: Any = importlib.import_module("numpy")
    token = [0]

    def after(tokens: list[int]) -> None:
        llama.eval(tokens)
        logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        token[0] = int(numpy.ctypeslib.as_array(logits, shape=(llama.n_vocab(),)).argmax())

    after(ids[:8])  # what is allocated and chosen once
    times = request_times(
        lambda: after(ids),
        lambda: after(token),
        request.steps,
        readings=request.readings,
        reset=llama.reset,
    )
    return {"version": f"llama-cpp-python {version} ({instructions.strip()})", **times}


if __name__ == "__main__":
    measured_by(measure)
