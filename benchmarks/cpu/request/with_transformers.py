"""Measure transformers. A way is float32 or bfloat16, with its dense cache, or with a bit width
for its QuantizedCache: `float32, 4 bits`. That needs optimum-quanto, which compiles C++ with ninja
when it first unpacks codes, before anything is timed."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from typing import Any

from benchmarks.cpu.request.child import Request, measured_by, request_times


def measure(request: Request) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    utilities: Any = importlib.import_module("transformers.cache_utils")
    torch.set_num_threads(request.cores)
    dtype, _, bits = request.way.partition(", ")
    if bits:
        if importlib.util.find_spec("optimum") is None:
            return {"skipped": "QuantizedCache needs optimum-quanto, which is not installed"}
        if lacking := [tool for tool in ("ninja", "c++") if shutil.which(tool) is None]:
            missing = " and ".join(lacking)
            return {"skipped": f"optimum-quanto compiles its kernels: PATH has no {missing}"}
    if request.warm:
        return {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request.model, dtype=getattr(torch, dtype)
    ).eval()

    def cache() -> Any:
        if not bits:
            return utilities.DynamicCache(config=model.config)
        return utilities.QuantizedCache("quanto", model.config, nbits=int(bits.split()[0]))

    state: list[Any] = []

    def after(tokens: Any) -> None:
        output = model(tokens, past_key_values=state[0], logits_to_keep=1)
        state[1:] = [output.logits.argmax(-1)]

    def reset() -> None:
        state[:] = [cache()]

    with torch.inference_mode():
        ids = request.prompt_ids()
        reset()
        after(torch.tensor([ids[:8]]))
        after(state[1])
        times = request_times(
            lambda: after(torch.tensor([ids])),
            lambda: after(state[1]),
            request.steps,
            readings=request.readings,
            reset=reset,
        )
    return {"version": f"{transformers.__version__}, torch {torch.__version__}", **times}


if __name__ == "__main__":
    measured_by(measure)
