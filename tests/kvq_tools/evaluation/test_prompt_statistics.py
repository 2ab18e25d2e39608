"""Caches that take statistics from a prompt get one in an evaluation, and all others are evaluated
as before."""

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_tools import evaluate, evaluate_caches
from kvq_tools.evaluation import run
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.methods_table import METHOD_CASES, MethodCase, cases

# a family with a key bias, which one row of the table subtracts
CONFIG = tiny_config("qwen2", hidden_size=128, head_dim=32)
WITH = (
    *("innerq2", "innerq3_sym", "innerq2_hybrid_prefill", "innerq2_slot", "innerq2_no_bias"),
    *("mixed", "squat2", "squat3_pre", "polar_global", "kvquant3_online", "fp8", "fp8_head"),
    *("nvfp4", "squat2_rotated_no_bias", "zipcache42", "zipcache83"),
)
KIVI, INNERQ = "kivi:recent=8,block=8", "innerq:sink=4,recent=8,block=8,group_size=8"
LENGTH = 80


@pytest.fixture(scope="module")
def llama():
    return random_llama(tiny_config("qwen2", hidden_size=128, head_dim=32, num_hidden_layers=1))


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, LENGTH)


def test_the_table_has_both_kinds():
    def takes(spec: str) -> bool:
        return kvq.cache.has_prompt_statistics(spec, CONFIG)

    assert {case.id for case in METHOD_CASES if takes(case.spec)} == set(WITH)
    plain = ("innerq:normalize=false", "innerq:skip_layers=0-1", "polarquant", "k=dense+v=innerq")
    assert not [spec for spec in plain if takes(spec)]


@cases(every=True)
def test_the_default_prompt_is_as_long_as_the_caches_need(case: MethodCase, ids):
    def prompt(*specs: str, **options) -> int:
        sizes = {"window": 48, "stride": 20} | options
        return run.check_request(CONFIG, ids, list(map(kvq.parse, specs)), **sizes).prompt

    needed = 28 if case.id in WITH else 0
    assert prompt(case.spec) == prompt("dense", case.spec) == needed
    assert prompt(case.spec, prompt=5) == 5
    for mode in ("chunked", "fake"):
        assert prompt(case.spec, mode=mode) == 0
    if needed:
        for options in ({"prompt": 0}, {"stride": 48}):
            with pytest.raises(ValueError, match="takes statistics from a prompt"):
                prompt(case.spec, **options)
    else:
        assert prompt(case.spec, prompt=0) == 0


def test_all_caches_of_a_run_are_scored_on_the_same_tokens(llama, ids):
    sizes = {"window": 48, "stride": 20}
    alone = evaluate(llama, KIVI, ids, **sizes)
    beside, innerq = evaluate_caches([(llama, KIVI), (llama, INNERQ)], ids, **sizes)
    assert (alone.prompt, beside.prompt, innerq.prompt) == (0, 28, 28)
    assert alone.index.tolist() == list(range(1, LENGTH))
    scored = [token for token in range(29, LENGTH) if token not in (48, 68)]  # next to a prompt
    assert beside.index.tolist() == innerq.index.tolist() == scored
    again = evaluate(llama, KIVI, ids, prompt=28, **sizes)
    np.testing.assert_array_equal(beside.nats, again.nats)
