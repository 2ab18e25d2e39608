"""lm-evaluation-harness's local-completions model against the server: its scores and texts are the
engine's."""

import pathlib
from typing import Any

import numpy as np
import openai
import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval")
pytest.importorskip("tenacity", reason="needs tenacity, of the extra test")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.kvq_tools.serving.running import CAPACITY, KEY, NAME, PROMPT, Running


@pytest.fixture
def model(server: Running, shallow: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    where = dict(
        base_url=f"{server.url}/v1/completions",
        model=NAME,
        tokenizer=str(shallow),
        tokenizer_backend="huggingface",
    )
    return LocalCompletionsAPI(**where, max_length=CAPACITY, num_concurrent=1)


def test_local_completions_score_and_generate(server: Running, client: openai.OpenAI, model: Any):
    asked = dict(model=NAME, prompt=PROMPT, max_tokens=10, temperature=0)
    text = client.completions.create(**asked).choices[0].text
    pairs = [(PROMPT, text), (PROMPT, " zebra")]
    found = model.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], disable_tqdm=True
    )
    assert [greedy for _, greedy in found] == [True, False]
    for (context, continuation), (score, _) in zip(pairs, found, strict=True):
        ids = server.tokenizer(context + continuation, add_special_tokens=False).input_ids
        new = len(ids) - len(server.tokenizer(context, add_special_tokens=False).input_ids)
        told = (
            client.completions.create(model=NAME, prompt=ids, max_tokens=0, echo=True, logprobs=1)
            .choices[0]
            .logprobs
        )
        assert score == pytest.approx(np.sum(told.token_logprobs[-new:]), abs=1e-4)
    until = {"until": ["\n\n"], "max_gen_toks": 10, "do_sample": False, "temperature": 0}
    (generated,) = model.generate_until(
        [Instance("generate_until", {}, (PROMPT, until), 0)], disable_tqdm=True
    )
    assert generated == text


def test_a_score_is_the_same_if_the_model_would_end_the_text_next(
    server: Running, model: Any, monkeypatch: pytest.MonkeyPatch
):
    """lm-eval cuts the token that it has to let the server draw off the end of the list. A list
    without the end token would lose the last token that is scored."""
    pair = PROMPT, " a river"
    asked = [Instance("loglikelihood", {}, pair, 0)]
    (plain,) = model.loglikelihood(asked, disable_tqdm=True)
    context = server.tokenizer(PROMPT, add_special_tokens=False).input_ids
    ids = server.tokenizer("".join(pair), add_special_tokens=False).input_ids
    found = server.post(
        "/v1/completions", {"model": NAME, "prompt": ids, "max_tokens": 1, "temperature": 0}
    )[1]
    drawn = server.tokenizer(found["choices"][0]["text"], add_special_tokens=False).input_ids[0]
    assert len(ids) > len(context)
    monkeypatch.setattr(server.service, "_end_ids", (drawn,))
    assert model.loglikelihood(asked, disable_tqdm=True) == [plain]
