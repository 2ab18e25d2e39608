"""Sequences of more than four windows, through a cache whose rings of blocks wrap around: logits
and greedy tokens of transformers, in long prompts and in long answers."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import decode_step, prefill
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.model import Llama
from tests.kvq_models.checkpoints import (
    CASES,
    WINDOW,
    build_checkpoint,
    random_tokens,
    row_errors,
    torch_logits,
)

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")

PROMPTS, STEPS = (4 * WINDOW + 3, 5), 4 * WINDOW + 2
SPEC = "dense:sink=0,recent=2,block=4"  # a ring of a few blocks, each overwritten several times
TOLERANCE = 1e-4
step = jax.jit(decode_step, donate_argnames="cache")


def continued(llama: Llama) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return each row's logits from the last token of its prompt on, and its tokens with the greedy
    answer."""
    prompts = random_tokens((2, max(PROMPTS)))
    cache = kvq.init_cache(SPEC, llama.config, 2, max(PROMPTS) + STEPS, "float32")
    logits, cache = prefill(llama, cache, prompts, jnp.asarray(PROMPTS))
    steps = [np.asarray(logits)]
    for _ in range(STEPS - 1):
        logits, cache = step(llama, cache, jnp.asarray(steps[-1].argmax(-1), jnp.int32))
        steps.append(np.asarray(logits))
    by_row = np.stack(steps, axis=1)
    rows = [
        np.concatenate([prompts[b, :length], by_row[b].argmax(-1)])
        for b, length in enumerate(PROMPTS)
    ]
    return list(by_row), rows


@pytest.mark.parametrize("family", ["mistral_window", "gemma2", "gemma3"])
def test_prompts_and_answers_of_four_windows_equal_those_of_transformers(
    family: str, tmp_path: pathlib.Path
):
    case = CASES[family]
    longer = case.fields | {"max_position_embeddings": 128}
    reference = build_checkpoint(tmp_path, dataclasses.replace(case, fields=longer))
    llama, _ = load_llama(tmp_path, dtype="float32")
    assert llama.config.sliding_window == WINDOW
    for row, (found, tokens) in enumerate(zip(*continued(llama), strict=True)):
        start = PROMPTS[row] - 1
        wanted = torch_logits(reference, tokens[None, :-1])[0, start:]
        errors = row_errors(found, wanted)
        assert errors.max() < TOLERANCE, f"row {row}, step {errors.argmax()}: {errors.max():.1e}"
        assert (wanted.argmax(-1) == tokens[start + 1 :]).all(), "another greedy answer"
        assert len(set(tokens[start + 1 :])) > 2, "one token over and over"
    reference.config.sliding_window += 1
    for module in reference.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window += 1
    other = torch_logits(reference, tokens[None, :-1])[0, start:]
    assert row_errors(found, other)[-1] > 10 * TOLERANCE, "a longer window would pass"
