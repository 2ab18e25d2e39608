"""Llama-family models that decode through a quantized cache.

from models import load_llama, prepare, prefill, decode_step, generate, score
"""

from pathlib import Path

from models.checkpoint import load_llama, save_llama
from models.config import LlamaConfig
from models.decoding import decode_step, prefill, right_padded, score
from models.generation import Generated, generate, generate_stream
from models.llama import Llama, forward
from models.prepare import prepare
from models.sampling import Sampling

EMBEDDED = Path(__file__).parent / "embedded"  # the small Llama that ships with the package, a Hugging Face directory

__all__ = [
    "EMBEDDED",
    "Generated",
    "Llama",
    "LlamaConfig",
    "Sampling",
    "decode_step",
    "forward",
    "generate",
    "generate_stream",
    "load_llama",
    "prefill",
    "prepare",
    "right_padded",
    "save_llama",
    "score",
]
