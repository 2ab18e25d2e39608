"""Gemma 3 270M from its GGUF file against transformers' reading of the same file, on a text longer
than the window."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_tools.cli
from kvq_models import load_llama
from kvq_models.llama.model import forward
from kvq_models.named_models.published import GEMMA3_270M as GEMMA
from tests.kvq_models.checkpoints import torch_logits

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
pytestmark = pytest.mark.skipif(
    not GEMMA.is_here, reason=f"{GEMMA.title} is not here: `kvq fetch {GEMMA.name}`"
)

TOKENS = 576  # a window has 512
PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"


def log_likelihood(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the log-likelihood of each token after the first."""
    logs = jax.nn.log_softmax(jnp.asarray(logits[0, :-1]))
    return np.asarray(jnp.take_along_axis(logs, jnp.asarray(tokens[0, 1:, None]), axis=1))[:, 0]


def test_perplexity_and_tokens_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch):
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    llama, tokenizer = load_llama(GEMMA.name, dtype="float32")
    text = PASSAGE.read_text()[:4000]
    tokens = tokenizer(text, return_tensors="np")["input_ids"][:, :TOKENS]
    assert tokens[0, 0] == llama.config.bos_token_id
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokens.shape[1] == TOKENS > (llama.config.sliding_window or TOKENS)
    ours = log_likelihood(np.asarray(jax.jit(forward)(llama, jnp.asarray(tokens))), tokens)

    # seconds for every time that the vocabulary is parsed
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    config = AutoConfig.from_pretrained(GEMMA.path.parent, gguf_file=GEMMA.path.name)
    theirs = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    read = load_gguf_checkpoint(str(GEMMA.path), return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"], strict=False)  # without the tied head
    wanted = log_likelihood(torch_logits(theirs, tokens), tokens)
    ratio = np.exp(wanted.mean() - ours.mean())
    assert abs(ratio - 1) < 0.01, f"perplexity is {ratio:.4f} of transformers'"
    past = np.abs(ours - wanted)[512:]
    assert past.max() < 1e-2, (
        f"past the window, token {512 + past.argmax()} is {past.max():.1e} off"
    )
