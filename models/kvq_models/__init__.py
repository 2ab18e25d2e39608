"""Llama-family models that decode through a quantized cache.

Example:

    from kvq_models import load_llama, prepare, prefill, decode_step, generate, score

The names are imported when they are first used: `kvq --help` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kvq_models.named_models.names import EMBEDDED_FOLDER as EMBEDDED

if TYPE_CHECKING:
    from kvq_models.calibration.file import Calibration, resolved, save_calibration
    from kvq_models.calibration.fingerprint import load_calibration
    from kvq_models.calibration.fit import calibrate
    from kvq_models.inference.checked_input import right_padded
    from kvq_models.inference.decoding import decode_step, prefill, score
    from kvq_models.inference.generation import Generated, generate, generate_stream
    from kvq_models.inference.method_parameters import prepare
    from kvq_models.inference.sampling import Sampling
    from kvq_models.inference.speculation import generate_drafted
    from kvq_models.llama.checkpoint import load_llama, save_llama
    from kvq_models.llama.config import LlamaConfig
    from kvq_models.llama.flat_llama import FlatLlama
    from kvq_models.llama.model import Llama, forward
    from kvq_models.llama.sharding import shard_llama

_MODULES = {
    "Calibration": "calibration.file",
    "FlatLlama": "llama.flat_llama",
    "Generated": "inference.generation",
    "Llama": "llama.model",
    "LlamaConfig": "llama.config",
    "Sampling": "inference.sampling",
    "calibrate": "calibration.fit",
    "decode_step": "inference.decoding",
    "forward": "llama.model",
    "generate": "inference.generation",
    "generate_drafted": "inference.speculation",
    "generate_stream": "inference.generation",
    "load_calibration": "calibration.fingerprint",
    "load_llama": "llama.checkpoint",
    "prefill": "inference.decoding",
    "prepare": "inference.method_parameters",
    "resolved": "calibration.file",
    "right_padded": "inference.checked_input",
    "save_calibration": "calibration.file",
    "save_llama": "llama.checkpoint",
    "score": "inference.decoding",
    "shard_llama": "llama.sharding",
}

__all__ = [
    "EMBEDDED",
    "Calibration",
    "FlatLlama",
    "Generated",
    "Llama",
    "LlamaConfig",
    "Sampling",
    "calibrate",
    "decode_step",
    "forward",
    "generate",
    "generate_drafted",
    "generate_stream",
    "load_calibration",
    "load_llama",
    "prefill",
    "prepare",
    "resolved",
    "right_padded",
    "save_calibration",
    "save_llama",
    "score",
    "shard_llama",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvq_"):
            raise
        # the library is installed, and the extra is not
        hint = f"kvq_models needs {error.name}: pip install 'kvq-jax[models]'"
        raise ModuleNotFoundError(hint, name=error.name) from error
    globals()[name] = value  # later look-ups do not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
