"""`kvq generate`, `eval` and `chat` with --mesh: the results of one device, and one line for a mesh
that cannot be."""

import io
import json

import jax
import pytest

import kvq_jax as kvq
from kvq_models.llama.checkpoint import read_config
from kvq_tools.cli.mesh import placement_of
from tests.kvq_models.checkpoints import CHAT_TEMPLATE

SPEC = "kivi:recent=8,block=16"
SHARED = ("--capacity=128", "--max-new-tokens=6")  # requests of the same sizes share their programs
TEXT = "the key of the cat is seven, and the key of the dog is four. " * 4


def test_generate_writes_the_text_of_one_device(run_json, run, model, caplog):
    request = ("generate", model, "--prompt", TEXT[:60], "--cache", SPEC, *SHARED)
    one = run_json(*request)
    with jax.log_compiles():
        code, out, _ = run(*request, "--mesh", "auto")
    assert code == 0
    assert out.startswith(one["text"] + "\n")
    assert "on a mesh of heads=2,tokens=4" in out
    assert one["mesh"] is None
    assert (
        f"; {one['quantized_tokens']} of {one['prompt_tokens'] + one['new_tokens']} tokens"
        " quantized" in out
    )
    assert one["quantized_tokens"] > 0
    assert caplog.text.count("Finished XLA compilation of jit(advance)") == 1, (
        "the loop is compiled again while it runs"
    )


def test_one_device_is_no_mesh(model):
    config = read_config(model)
    assert placement_of("tokens=1", [kvq.parse(SPEC)], config, 1, 64, "float32") is None
    assert (
        str(placement_of("auto", [kvq.parse(SPEC), kvq.parse("xquant")], config, 1, 64, "float32"))
        == "tokens=8"
    ), "what all can have"


def test_eval_measures_what_one_device_measures(run_json, model, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    command = f"eval {model} --text {tmp_path / 'text'} --cache={SPEC} --window=48 --batch=2"
    one, split = run_json(command), run_json(f"{command} --mesh rows=2,heads=2,tokens=2")
    (before,), (after,) = one["caches"], split["caches"]
    assert before["kl"] > 1e-5, "a cache that changes nothing would pass"
    for key in ("perplexity", "kl", "agreement"):
        assert after[key] == pytest.approx(before[key], rel=1e-3), key


def test_chat_answers_as_on_one_device(run_json, model, monkeypatch):
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    answers = []
    for mesh in ((), ("--mesh", "auto")):
        monkeypatch.setattr("sys.stdin", io.StringIO(TEXT[:60] + "\n"))
        found = run_json("chat", model, "--cache", SPEC, *SHARED, *mesh)
        answers.append(
            [(turn["answer"], turn["holds"]["quantized_tokens"]) for turn in found["turns"]]
        )
    assert answers[0] == answers[1]
    assert answers[0][0][1] > 0, "nothing is quantized"


REFUSED = {  # when it is read, and when a cache is placed; test_refusals.py has the others
    "tokens=9": "mesh 'tokens=9' needs 9 devices, and there are 8",
    "rows=2": "1 rows do not divide into 2 parts",
}


@pytest.mark.parametrize("mesh", REFUSED)
def test_a_mesh_that_cannot_be_is_refused_before_weights_are_read(run, model, monkeypatch, mesh):
    monkeypatch.setattr(
        "kvq_models.llama.checkpoint.load_weights", lambda *_, **__: pytest.fail("weights are read")
    )
    code, out, told = run("generate", model, "--prompt", "the cat", "--cache", SPEC, "--mesh", mesh)
    assert (code, out) == (2, "")
    assert REFUSED[mesh] in told
    assert told.count("\n") == 1


def test_many_prompts_are_for_one_device(run, model, tmp_path):
    code, _, told = run(
        "generate", model, "--prompts", "p", "--out", tmp_path / "o", "--mesh", "auto"
    )
    assert (code, told) == (2, "kvq: error: --mesh is for one prompt: leave out --prompts\n")
