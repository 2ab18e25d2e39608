"""Llama-family models that decode through a quantized cache.

from models import load_llama, prepare, prefill, decode_step, generate, score

The names are imported when they are first used: `kvq --help` does not wait for JAX.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.calibration.file import Calibration, load_calibration, save_calibration
    from models.calibration.fit import calibrate
    from models.checkpoint import load_llama, save_llama
    from models.config import LlamaConfig
    from models.decoding import decode_step, prefill, right_padded, score
    from models.evaluation.results import Evaluation
    from models.evaluation.run import evaluate, evaluate_caches
    from models.evaluation.text import tokenize
    from models.generation import Generated, generate, generate_stream
    from models.llama import Llama, forward
    from models.preparation import prepare
    from models.sampling import Sampling

EMBEDDED = Path(__file__).parent / "embedded"  # the small Llama that ships with the package, a Hugging Face directory

_MODULES = {
    "Calibration": "calibration.file",
    "Evaluation": "evaluation.results",
    "Generated": "generation",
    "Llama": "llama",
    "LlamaConfig": "config",
    "Sampling": "sampling",
    "calibrate": "calibration.fit",
    "decode_step": "decoding",
    "evaluate": "evaluation.run",
    "evaluate_caches": "evaluation.run",
    "forward": "llama",
    "generate": "generation",
    "generate_stream": "generation",
    "load_calibration": "calibration.file",
    "load_llama": "checkpoint",
    "prefill": "decoding",
    "prepare": "preparation",
    "right_padded": "decoding",
    "save_calibration": "calibration.file",
    "save_llama": "checkpoint",
    "score": "decoding",
    "tokenize": "evaluation.text",
}

__all__ = [
    "EMBEDDED",
    "Calibration",
    "Evaluation",
    "Generated",
    "Llama",
    "LlamaConfig",
    "Sampling",
    "calibrate",
    "decode_step",
    "evaluate",
    "evaluate_caches",
    "forward",
    "generate",
    "generate_stream",
    "load_calibration",
    "load_llama",
    "prefill",
    "prepare",
    "right_padded",
    "save_calibration",
    "save_llama",
    "score",
    "tokenize",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # from now on without this function
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
