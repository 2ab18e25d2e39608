"""Prompts are the benchmarks' own, to the letter: digests of what the benchmarks publish."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvq_tools.evaluation.tasks import gsm8k, longbench

LONGBENCH = "6ad3948bb64d57eff1b80bc1db21516086916a3fe3122899b9800e217652caa4"  # dataset2prompt.json and dataset2maxlen.json
GSM8K = "8891624983ad7951218788c6e80ea96393295ebbe2b89848c286d91e20129aec"  # questions and answers of gsm8k-cot, in order


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def test_longbench_s_prompts_and_lengths_are_those_of_the_benchmark():
    prompts = {name: [task.prompt, task.max_new_tokens] for name, task in longbench.datasets().items()}
    assert digest(prompts) == LONGBENCH
    prompts["qasper"][0] += " "
    assert digest(prompts) != LONGBENCH


def test_the_eight_shots_of_gsm8k_are_those_of_the_benchmark():
    shots = [list(shot) for shot in gsm8k.shots()]
    assert digest(shots) == GSM8K
    assert digest(shots[::-1]) != GSM8K
