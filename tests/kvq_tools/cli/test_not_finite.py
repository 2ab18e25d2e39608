"""If a model computes nan or inf, every command says so in one line and ends with a distinct exit
status."""

import json
import pathlib

import jax.numpy as jnp
import pytest

from kvq_models import load_llama, save_llama
from tests.kvq_models.checkpoints import PROMPT

CACHE = "kivi:bits=4,group_size=8,recent=0"
COMMANDS = {
    "generate": f"generate {{model}} --prompt='{PROMPT}' --cache={CACHE} --max-new-tokens=2",
    "eval": f"eval {{model}} --cache {CACHE} --text {{text}} --window 16 --limit 16 --mode fake",
}


@pytest.fixture(scope="module")
def overflowing(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the directory of a model with finite weights whose logits are not finite."""
    directory = tmp_path_factory.mktemp("overflowing")
    llama, tokenizer = load_llama(model, dtype="float32")
    for projection in (llama.layers[0].v_proj, llama.layers[0].o_proj):
        projection.kernel[...] = projection.kernel[...] * jnp.float32(1e25)
    save_llama(llama, directory, tokenizer)
    return directory


@pytest.fixture
def ended(run, tmp_path: pathlib.Path):
    """ended(command, model) -> (exit code, stderr)."""
    (tmp_path / "text.txt").write_text(PROMPT)

    def call(command: str, model: pathlib.Path) -> tuple[int, str]:
        code, _, err = run(COMMANDS[command].format(model=model, text=tmp_path / "text.txt"))
        return code, err

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_a_status_of_its_own(command: str, ended, overflowing: pathlib.Path):
    code, err = ended(command, overflowing)
    assert code == 3, err
    errors = [line for line in err.splitlines() if line.startswith("kvq: error: ")]
    assert errors == [
        f"kvq: error: the model computed numbers that are not finite (nan or inf) with {CACHE}"
    ], err


def test_a_prompt_that_is_not_saved_is_an_object_too(run, overflowing, tmp_path):
    out = tmp_path / "prompt.safetensors"
    asked = f"prefill {overflowing} --prompt='{PROMPT}' --cache={CACHE} --out {out} --json"
    code, found, err = run(asked)
    assert (code, out.exists()) == (3, False), err
    told = json.loads(found)
    assert (told["format"], told["status"]) == ("kvq.error", 3)
    assert f"kvq: error: {told['error']}\n" in err


def test_the_same_model_before_its_weights_grew_ends_well(ended, model: pathlib.Path):
    assert ended("eval", model)[0] == 0
