"""The measurements of a run, shortest prompts first, so that a run that stops has whole tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.cpu.request import with_onnx
from benchmarks.cpu.request.random_file import LLAMA_1B

KVQ, LLAMA_CPP, TRANSFORMERS, ONNX = "kvq", "llama.cpp", "transformers", "onnxruntime"
MODULES = {
    KVQ: "with_kvq",
    LLAMA_CPP: "with_llama_cpp",
    TRANSFORMERS: "with_transformers",
    ONNX: "with_onnx",
}
SMOLLM2 = "smollm2"
ATTENTION = "attention of a layer, "
PRODUCTS = f"{ATTENTION}products alone"
METHODS = {ONNX: with_onnx.METHOD}  # how a system is measured, by number; 1 if it is not here
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    SMOLLM2: {
        KVQ: (
            "kivi:bits=4",
            "dense",
            "kivi:bits=4, int8 activations",
            f"{ATTENTION}kivi:bits=4",
            f"{ATTENTION}dense",
            PRODUCTS,
        ),
        LLAMA_CPP: ("f16", "f16, two products", "q8_0", "q4_0"),
        TRANSFORMERS: ("float32", "bfloat16", "float32, 4 bits"),
        ONNX: (f"{ATTENTION}float32",),
    },
    LLAMA_1B: {KVQ: ("kivi:bits=4",), LLAMA_CPP: ("f16", "f16, two products", "q4_0")},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement: a model, a system and its way, tokens of the prompt, cores."""

    model: str
    system: str
    way: str
    prompt: int
    cores: int

    @property
    def shorter(self) -> tuple[str, str, str, int]:
        """The key that all prompts of a way share: after one that takes too long, longer ones are
        not tried."""
        return self.model, self.system, self.way, self.cores

    def __str__(self) -> str:
        return f"{self.model}, {self.prompt} tokens, {self.cores} cores: {self.system} {self.way}"


def cells(
    models: Sequence[str], systems: Sequence[str], prompts: Sequence[int], cores: Sequence[int]
) -> Iterator[Cell]:
    for prompt in sorted(prompts):
        for model in models:
            for count in cores:
                for system, ways in WAYS[model].items():
                    if system in systems:
                        yield from (Cell(model, system, way, prompt, count) for way in ways)
