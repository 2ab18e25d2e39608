"""SQuat on the embedded model's activations."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import EMBEDDED, load_llama
from laboratory.studies import squat_subspace
from laboratory.studies.squat_subspace import before_rope, layer_inputs, score_error, tokens_of

PROMPT, TOTAL = 256, 384


PASSAGE = "kvq_tools/cli/passage.txt"


@functools.cache
def embedded_layers(file: str = PASSAGE) -> list[kvq.LayerInputs]:
    """What the embedded model's layers see of a text."""
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    text = (squat_subspace.ROOT / file).read_text(encoding="utf-8")
    return layer_inputs(
        llama, np.asarray(tokenizer(text, verbose=False).input_ids[:TOTAL], np.int32)
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scores_of_later_queries_have_a_smaller_error_than_kivis_in_every_layer(bits: int):
    """Where the paper's Figure 2 looks, at queries and keys before RoPE, with the paper's rank and
    lambda. The subspace is that of the prompt's queries; a foreign one, of the same queries with
    their channels in another order, does not help.
    """
    for i, inputs in enumerate(map(before_rope, embedded_layers())):
        prompt, later = tokens_of(inputs, 0, PROMPT), inputs.q_rot[:, :, PROMPT:]
        kivi, squat = (
            score_error(
                later,
                prompt.k_rot,
                kvq.roundtrip(f"{name}:bits={bits}", prompt.k_rot, prompt.v, prompt.q_rot)[0],
            )
            for name in ("kivi", "squat")
        )
        assert squat < 0.95 * kivi, f"layer {i}: {squat:.4f}, and {kivi:.4f} with KIVI"
        foreign = kvq.roundtrip(
            f"squat:bits={bits}", prompt.k_rot, prompt.v, prompt.q_rot[..., ::-1]
        )[0]
        assert score_error(later, prompt.k_rot, foreign) > squat, f"layer {i}: any subspace does"


@pytest.mark.parametrize("text", [PASSAGE, "LICENSE"])
def test_after_rope_they_have_once_the_subspace_is_turned_to_their_positions(text: str):
    """Scores as the model makes them, of queries and keys after RoPE. The subspace of the prompt's
    queries where the prompt had them does not hold for the positions that follow (README of the
    method); turned there, it does, and queries that never were do not help.
    """
    options = f"rank=64,block_channels=8,ahead={TOTAL - PROMPT}"
    specs = {
        "turned": f"squat:{options}",
        "kivi": "kivi",
        "as they are": "squat:rank=64,block_channels=8",
    }
    ratios: dict[str, list[float]] = {"turned": [], "as they are": [], "foreign": []}
    for inputs in embedded_layers(text):
        prompt, later = tokens_of(inputs, 0, PROMPT), inputs.q_rot[:, :, PROMPT:]
        assert prompt.q_pre is not None
        foreign = dataclasses.replace(prompt, q_pre=prompt.q_pre[..., ::-1])
        coded = {name: kvq.roundtrip_layer(spec, prompt)[0] for name, spec in specs.items()}
        coded["foreign"] = kvq.roundtrip_layer(specs["turned"], foreign)[0]
        errors = {name: score_error(later, prompt.k_rot, keys) for name, keys in coded.items()}
        for name in ratios:
            ratios[name].append(errors[name] / errors["kivi"])
    means = {name: float(np.exp(np.mean(np.log(found)))) for name, found in ratios.items()}
    assert means["turned"] < 0.95, f"errors relative to KIVI's, by layer: {ratios}"
    assert max(ratios["turned"][1:]) < 0.95, (
        f"by layer: {ratios}"
    )  # the first layer, wired by hand, gains nothing
    assert ratios["turned"][0] < 1.03, f"by layer: {ratios}"
    assert means["as they are"] > 0.98, f"turning them is not what helps: {means}"
    assert means["foreign"] > 0.98, f"any subspace does: {means}"
