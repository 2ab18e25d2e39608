"""Help and refusals come before JAX is imported, and say what the commands would. Counting bytes
needs no reader of weights or tokens, whose import takes longer than all counting."""

import json
import pathlib
import struct
import subprocess
import sys
from typing import Any

from kvq_tools.cli.main import COMMANDS, PASSED_ON, build_parser
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import byte_level, write_gguf

WITHOUT_MODULES = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(json.loads(sys.argv[1]))  # any import of them fails
from kvq_tools.cli.main import main
results = []
for arguments in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except BaseException as end:
            code = end.code if isinstance(end, SystemExit) else repr(end)
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def without_jax(*commands: list[str]) -> list[tuple[Any, str, str]]:
    """Return (exit code, stdout, stderr) of each command in a process that cannot import JAX."""
    return without(["jax"], *commands)


def without(modules: list[str], *commands: list[str]) -> list[tuple[Any, str, str]]:
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_MODULES, json.dumps(modules), json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


def named(command: str) -> Any:
    """Return the subparser of a command."""
    (commands,) = (a for a in build_parser(command)._actions if a.dest == "==SUPPRESS==")
    return commands.choices[command]


def test_every_command_shows_its_own_help_without_jax():
    commands = [name for name in COMMANDS if name not in PASSED_ON]
    results = without_jax(*([name, "--help"] for name in commands))
    for name, (code, out, err) in zip(commands, results, strict=True):
        assert (code, err) == (0, ""), name
        assert out == named(name).format_help(), name


def gguf(path: pathlib.Path, architecture: bytes) -> str:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    field = text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    return str(path)


def test_what_cannot_work_is_refused_without_jax(tmp_path: pathlib.Path):
    unsupported, cut = gguf(tmp_path / "a.gguf", b"mamba"), tmp_path / "b.gguf"
    cut.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    cases = {
        ("generate", unsupported, "--prompt", "a"): "GGUF architecture 'mamba' is not supported",
        ("serve", unsupported): "GGUF architecture 'mamba' is not supported",
        ("chat", str(cut)): "b.gguf' is cut off or damaged",
        ("memory", str(tmp_path)): "model_type='bert'",
        ("generate", "embedded", "--promt", "a"): "no option --promt. Did you mean --prompt?",
        ("chat", "embedded", "--implementation", "cuda"): "invalid choice: 'cuda'",
        ("plan",): "required: MODEL",
        ("plan", "embedded", "--budget", "lots"): "argument --budget: 'lots' is not a budget",
        ("chat", "embedded", "--max-new-tokens", "0"): "argument --max-new-tokens: '0' must be",
        ("report", "embedded", "--contexts", "1,x", "--out", "o"): "argument --contexts: 'x' must",
        ("memory", "embedded", "--device", "h7"): "argument --device: device 'h7' is unknown",
        ("generat",): "no command 'generat'. Did you mean generate?",
    }
    for case, (code, out, err) in zip(cases, without_jax(*map(list, cases)), strict=True):
        assert (code, out) == (2, ""), (case, code)
        assert cases[case] in err, case
        assert err.count("\n") == 1, case


def test_the_control_needs_jax():
    ((code, _, _),) = without_jax(["methods"])
    assert "ModuleNotFoundError" in code


def test_bytes_are_counted_without_flax_and_readers_of_weights_and_tokens(tmp_path: pathlib.Path):
    path = write_gguf(random_llama(tiny_config()), tmp_path / "m.gguf", tokenizer=byte_level())
    memory = ["memory", "embedded", "--context", "2K"]
    results = without(
        ["flax", "transformers", "tokenizers", "gguf", "tqdm"],
        [*memory, "--cache", "kivi:bits=2"],
        [*memory, "--budget", "1GiB"],
        ["memory", str(path), "--cache", "kivi:bits=2"],
    )
    for word, (code, out, err) in zip(("kivi:bits=2", "dense", "kivi"), results, strict=True):
        assert (code, word in out) == (0, True), err
