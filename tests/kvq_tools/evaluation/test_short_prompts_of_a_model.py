"""A cache that takes statistics from a prompt predicts a text as well after a prompt of one token
as after one of 64."""

from __future__ import annotations

from importlib.resources import files

import jax
import numpy as np
import pytest

from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_models import EMBEDDED, load_llama
from kvq_tools import evaluate

TOKENS = 240


@pytest.fixture(scope="module")
def text():
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    passage = (files("kvq_tools.cli") / "passage.txt").read_text()[:2000]
    return llama, np.asarray(tokenizer(passage)["input_ids"])[:TOKENS]


def divergence(text, spec: str, prompt: int) -> float:
    """Return the mean KL of the tokens after the first 64."""
    llama, ids = text
    result = evaluate(llama, spec, ids, window=TOKENS, prompt=prompt)
    return float(np.mean(result.kl[-(TOKENS - 65) :]))


@pytest.mark.parametrize("spec", ["fp8", "nvfp4", "polarquant:preset=paper-v1"])
def test_a_prompt_of_one_token_is_as_good_as_a_long_one(text, spec: str):
    short, long = (divergence(text, spec, prompt) for prompt in (1, 64))
    assert 0 < short < 1.3 * long, f"{spec}: KL {short:.2e} after 1 token, {long:.2e} after 64"


def test_statistics_of_the_first_token_alone_would_be_seen(text, monkeypatch: pytest.MonkeyPatch):
    jax.clear_caches()  # else the programs of the test above would answer
    monkeypatch.setattr(Statistics, "widens", property(lambda _: False, lambda *_: None))
    short = divergence(text, "fp8", 1)
    monkeypatch.undo()
    jax.clear_caches()
    assert short > 1.5 * divergence(text, "fp8", 64)
