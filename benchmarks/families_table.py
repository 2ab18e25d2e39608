"""Write the table of model families in docs/models.md: a well-known model of each, the files in
which it is compared with transformers, and the bytes of its cache.

`python -m benchmarks.families_table` writes it between two comments.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import kvq_jax as kvq
from benchmarks.markdown import replaced, table
from kvq_jax.files import whole
from kvq_models import LlamaConfig

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "models.md"
BEGIN = "<!-- made by python -m benchmarks.families_table -->"
CONTEXT = 32768
CACHES = ("dense", "kivi:bits=4")
RANDOM = "random checkpoint"


class Published(NamedTuple):
    """A published model: the fields of its config.json that shape its cache.

    compared: the files in which its logits are compared with those of transformers.
    """

    name: str
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    positions: int
    compared: str = RANDOM
    fields: Mapping[str, Any] = MappingProxyType({})


MODELS = (
    Published("Llama-3.1-8B", "llama", 32, 32, 8, 128, 4096, 131072),
    Published("SmolLM2-135M", "llama", 30, 9, 3, 64, 576, 8192, f"{RANDOM}, its GGUF file"),
    Published("Mistral-7B-v0.1", "mistral", 32, 32, 8, 128, 4096, 32768),
    Published("Ministral-3-8B", "ministral3", 34, 32, 8, 128, 4096, 262144),
    Published("Qwen2.5-7B", "qwen2", 28, 28, 4, 128, 3584, 32768),
    Published("Qwen3-8B", "qwen3", 36, 32, 8, 128, 4096, 40960),
    Published(
        "Mixtral-8x7B",
        "mixtral",
        32,
        32,
        8,
        128,
        4096,
        32768,
        fields={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    Published(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        48,
        32,
        4,
        128,
        2048,
        40960,
        fields={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "sliding_window": None,
        },
    ),
    Published("Granite-3.3-8B", "granite", 40, 32, 8, 128, 4096, 131072),
    Published(
        "granite-4.0-micro",
        "granitemoehybrid",
        40,
        40,
        8,
        64,
        2560,
        131072,
        fields={"layer_types": ["attention"] * 40, "shared_intermediate_size": 8192},
    ),
    Published("SmolLM3-3B", "smollm3", 36, 16, 4, 128, 2048, 65536),
    Published("OLMo-2-7B", "olmo2", 32, 32, 32, 128, 4096, 4096),
    Published("Olmo-3-7B", "olmo3", 32, 32, 32, 128, 4096, 65536),
    Published("gemma-2-9b", "gemma2", 42, 16, 8, 256, 3584, 8192),
    Published(
        "gemma-3-270m",
        "gemma3_text",
        18,
        4,
        1,
        256,
        640,
        32768,
        f"{RANDOM}, its GGUF file",
        {"sliding_window": 512},
    ),
    Published(
        "gemma-3-12b",
        "gemma3_text",
        48,
        16,
        8,
        256,
        3840,
        131072,
        fields={"sliding_window": 1024},
    ),
    Published("Phi-3-mini-128k", "phi3", 32, 32, 32, 96, 3072, 131072),
    Published("Phi-4-mini", "phi3", 32, 24, 8, 128, 3072, 131072),
    Published(
        "gpt-oss-20b",
        "gpt_oss",
        24,
        64,
        8,
        64,
        2880,
        131072,
        fields={"num_local_experts": 32, "num_experts_per_tok": 4},
    ),
)


def config_of(model: Published) -> LlamaConfig:
    """Return a configuration with the model's cache; other sizes are arbitrary."""
    sizes = {
        "vocab_size": 32,
        "intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "model_type": model.model_type,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_size": model.width,
        "max_position_embeddings": model.positions,
    }
    return LlamaConfig.from_hf({**sizes, **model.fields})


def section() -> str:
    """Render the table and the paragraph below it."""
    head = (
        "model",
        "`model_type`",
        "windows",
        "equals transformers on",
        *map("`{}`".format, CACHES),
    )
    return f"{table(head, map(_line, MODELS))}\n\n{_NOTE}"


_NOTE = f"""\
The last columns are MiB of the cache of one sequence of {CONTEXT // 1024}K tokens, with
full-precision rows in bfloat16. A windowed layer keeps its window, and
`kivi:bits=4` quantizes it, too."""


def _line(model: Published) -> tuple[str, ...]:
    config = config_of(model)
    layouts = (kvq.cache.layout(cache, config, 1, CONTEXT, "bfloat16") for cache in CACHES)
    windows = f"{config.sliding_window} in {len(config.windowed_layers)} of {model.layers} layers"
    return (
        model.name,
        f"`{model.model_type}`",
        windows if config.sliding_window else "none",
        model.compared,
        *(f"{kvq.size.nbytes(layout) / 2**20:,.0f}" for layout in layouts),
    )


def page() -> str:
    """Return docs/models.md with the table of today."""
    return replaced(PAGE.read_text(encoding="utf-8"), BEGIN, section())


if __name__ == "__main__":
    whole.write(PAGE, page())
