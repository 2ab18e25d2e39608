"""Measure ONNX Runtime's GroupQueryAttention of one layer, fp32, its cache in one buffer that both
its input and its output bind. The way is `attention of a layer, float32`."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.cpu.request.child import Request, measured_by, request_times

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # of SmolLM2-135M
METHOD = 2  # the first one drew random rows inside the clock, and read a prompt once


def _session(runtime: Any, cores: int) -> Any:
    helper: Any = importlib.import_module("onnx.helper")
    kind = importlib.import_module("onnx").TensorProto
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    past = [1, KV_HEADS, "capacity", HEAD_DIM]
    floats = {"q": [1, "T", width], "k": [1, "T", kv_width], "v": [1, "T", kv_width]}
    floats |= {"past_k": past, "past_v": past}
    inputs = [helper.make_tensor_value_info(n, kind.FLOAT, s) for n, s in floats.items()]
    inputs += [helper.make_tensor_value_info("seqlens", kind.INT32, [1])]
    inputs += [helper.make_tensor_value_info("total", kind.INT32, [])]
    outputs = {"out": [1, "T", width], "new_k": past, "new_v": past}
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "seqlens", "total"],
        list(outputs),
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        inputs,
        [helper.make_tensor_value_info(n, kind.FLOAT, s) for n, s in outputs.items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = cores
    return runtime.InferenceSession(model.SerializeToString(), options)


def measure(request: Request) -> dict[str, Any]:
    if request.warm:
        return {}
    runtime: Any = importlib.import_module("onnxruntime")
    numpy: Any = importlib.import_module("numpy")
    session = _session(runtime, request.cores)
    random = numpy.random.default_rng(0)
    widths = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    prompt, token = (
        {n: random.standard_normal((1, t, w), numpy.float32) for n, w in widths.items()}
        for t in (request.prompt, 1)
    )
    shape = (1, KV_HEADS, request.prompt + request.steps + 2, HEAD_DIM)
    caches = {
        name: runtime.OrtValue.ortvalue_from_numpy(numpy.zeros(shape, numpy.float32))
        for name in ("k", "v")
    }
    length = [0]

    def reset() -> None:
        length[0] = 0

    def run(rows: dict[str, Any]) -> None:
        binding = session.io_binding()
        for name, values in rows.items():
            binding.bind_cpu_input(name, values)
        for name, cache in caches.items():
            binding.bind_ortvalue_input(f"past_{name}", cache)
            binding.bind_ortvalue_output(f"new_{name}", cache)
        length[0] += rows["q"].shape[1]
        binding.bind_cpu_input("seqlens", numpy.array([length[0] - 1], numpy.int32))
        binding.bind_cpu_input("total", numpy.array(length[0], numpy.int32))
        binding.bind_output("out")
        session.run_with_iobinding(binding)

    run(prompt)  # what is allocated and chosen once
    times = request_times(
        lambda: run(prompt),
        lambda: run(token),
        request.steps,
        readings=request.readings,
        reset=reset,
    )
    return {"version": runtime.__version__, "method": METHOD, **times}


if __name__ == "__main__":
    measured_by(measure)
