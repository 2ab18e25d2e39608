"""Fixtures of several folders: `kvq` run in this process, from its arguments to its exit code;
small models to run it on; a calibration.

The project's packages are imported inside of the fixtures: pytest reads this file before it
installs the hook that checks shapes.
"""

import json
import shlex
import shutil
import signal

import jax
import jaxtyping
import pytest


@pytest.fixture
def types_unchecked(monkeypatch):
    """Types are not checked at calls, as for users: a wrong value meets the error that the code
    itself has for it."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def usual_promotion():
    """Run in JAX's usual modes, which code of other projects expects."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def run(capsys):
    """run(*arguments) -> (exit code, stdout, stderr). The first argument may be a command as it is
    typed, of several words."""

    from kvq_tools.cli import main

    def call(command="", *arguments):
        code = main.main([*shlex.split(command), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    from tests.kvq_tools.cli.json_page import undescribed_keys

    def call(*arguments):
        code, out, err = run(*arguments, "--json")
        assert code == 0, f"{arguments} failed: {err}"
        found = json.loads(out)
        assert found["version"] == 1
        undescribed = undescribed_keys(found)
        assert not undescribed, f"docs/json.md lacks {undescribed} of {found['format']}"
        return found

    return call


@pytest.fixture
def sigint():
    """Let SIGINT interrupt this process. In a shell's background job it is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def press_in(monkeypatch, sigint):
    """press_in(loop, item) presses Ctrl-C before this item of the loops whose message has `loop`,
    instead of showing their bars."""

    def patch(loop, item):
        def pressed(items, message):
            for index, one in enumerate(items):
                if loop in message and index == item:
                    signal.raise_signal(signal.SIGINT)
                yield one

        monkeypatch.setattr("kvq_tools.cli.until_pressed.bar", pressed)

    return patch


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a directory with a random one-layer model and a byte-level tokenizer, whose tokens
    often are parts of characters."""
    from tests.kvq_models.checkpoints import PROMPT, save_with_tokenizer

    return save_with_tokenizer(tmp_path_factory.mktemp("model"), PROMPT * 3)


@pytest.fixture(scope="module")
def bare(model, tmp_path_factory):
    """Return the same model without its tokenizer."""
    directory = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, directory)
    return directory


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """Return a directory with the first and the last layer of the embedded model, and its
    tokenizer: trained weights, half of the programs.

    The first layer alone attends to the token before, which windows keep: no body would show in its
    outputs.
    """
    from safetensors.flax import load_file, save_file

    from kvq_models import EMBEDDED

    directory = tmp_path_factory.mktemp("model") / "shallow"
    shutil.copytree(EMBEDDED, directory)
    tensors = load_file(EMBEDDED / "model.safetensors")
    config = json.loads((EMBEDDED / "config.json").read_text())
    last = f".layers.{config['num_hidden_layers'] - 1}."
    kept = {
        name.replace(last, ".layers.1."): array
        for name, array in tensors.items()
        if ".layers." not in name or ".layers.0." in name or last in name
    }
    # embedding and last norm; of a layer seven projections and two norms
    assert len(kept) == 2 + 2 * 9
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return directory


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return the work directory of a finished run."""
    from tests.kvq_models import calibration_runs

    directory = tmp_path_factory.mktemp("calibration") / "work"
    calibration_runs.run(directory)
    return directory


@pytest.fixture
def file(work, tmp_path):
    from kvq_models import save_calibration
    from tests.kvq_models import calibration_runs

    path = tmp_path / "f.safetensors"
    save_calibration(calibration_runs.run(work), path)
    return path
