"""The command line itself: its help, and output that cannot be written."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

import kvq_jax as kvq
from kvq_tools.cli import main
from kvq_tools.cli.commands import generate

MEMORY = ("memory", "embedded", "--cache", "kivi:bits=2")


def help_of(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main.main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


WITHOUT_A_CACHE = ("", "fetch", "lm-eval", "plan", "quantize-weights")


@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_help_fits_80_columns_and_has_an_example_and_the_grammar(command, capsys, monkeypatch):
    text = help_of(command.split(), capsys, monkeypatch)
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert not wide, "\n".join(wide)
    grammar = () if command in WITHOUT_A_CACHE else ("SPEC, the argument of --cache",)
    json_option = () if command in ("", *main.PASSED_ON) else ("--json",)
    for part in (f"kvq {command}", *(["example"] if command else []), *json_option, *grammar):
        assert part in text, f"kvq {command} --help lacks {part!r}"


def test_kvq_alone_shows_its_help(run, capsys, monkeypatch):
    text = help_of([], capsys, monkeypatch)
    assert run() == (0, text, "")
    assert "start here:" in text


@pytest.mark.parametrize(
    "request_",
    [
        "generate embedded --prompt a",
        "generate embedded --prompts f --out o",
        "prefill embedded --prompt a --out o",
        "chat embedded",
        "serve embedded",
        "doctor embedded",
        "calibrate embedded --text f --out o",
    ],
)
def test_a_second_cache_is_refused_if_only_one_can_run(request_, run):
    told = f"kvq: error: kvq {request_.split()[0]} takes one --cache; to compare several, use"
    for one, other in (("kivi", "dense"), ("dense", "dense"), ("kivi", "plan.json")):
        refused = run(f"{request_} --cache {one} --cache {other}")
        assert refused == (2, "", f"{told} kvq demo or kvq eval\n")


def test_output_names_a_cache_as_it_was_typed(model, run):
    typed = "kivi:bits=2,sink=0"
    assert str(kvq.parse(typed)) == "kivi", "the test shows nothing: no default is typed"
    prompt = ("--prompt", "the cat", "--max-new-tokens", 2, "--cache", typed)
    assert f"[cache {typed}: " in run("generate", model, *prompt)[1]
    assert f"{typed} at 256 tokens" in run("doctor", model, "--cache", typed)[1]


def test_methods_shows_the_named_ones_alone(run, run_json):
    named = run_json("methods", "xquant", "kivi")["methods"]
    assert [method["name"] for method in named] == ["xquant", "kivi"]
    code, out, _ = run("methods", "kivi")
    assert code == 0
    assert out.startswith(f"kivi: {kvq.methods.METHODS['kivi'].summary}")
    assert "\ninnerq: " not in out
    assert "\ninnerq: " in run("methods", "kivi", "innerq")[1]


def test_a_context_is_written_alike_everywhere(run_json, tmp_path, model):
    assert run_json("doctor", "embedded", "--context", "1K")["context"] == 1024
    assert run_json("memory", "embedded", "--cache", "dense", "--context", "1K")["context"] == 1024


def test_plan_says_in_one_line_what_it_needs(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path))
    assert run("plan", "embedded", "--context", "32K")[2].splitlines()[-1] == (
        "kvq: error: kvq plan needs a budget: --budget 2.5bits, --budget 600MiB, or --device with"
        " --tokens-per-second; and --text FILE to measure, or --calibration F: no plan of"
        " 'embedded' was made yet"
    )


def test_a_plan_without_a_text_uses_the_calibration_in_the_folder_of_work(run, tmp_path):
    kept_here = tmp_path / "waterfill.safetensors"
    kept_here.write_text("damaged")
    code, _, err = run("plan", "embedded", "--budget", "2.5bits", "--work", tmp_path)
    assert code == 2
    assert str(kept_here) in err, "no calibration was looked for here"


def process(*arguments, redirect="", unbuffered="1"):
    """Run `kvq` in a shell with a redirection and return (exit code, stdout, stderr)."""
    script = f'exec "$@" {redirect}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "kvq_tools", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": unbuffered},
    )
    return done.returncode, done.stdout, done.stderr


def assert_one_line(result, message):
    code, out, err = result
    assert (code, out) == (1, ""), err
    lines = [line for line in err.splitlines() if not line.startswith("kvq: counting")]
    assert lines == [message], err


FULL = "kvq: error: stdout cannot be written: No space left on device"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(MEMORY, "1"), (("--help",), "")], ids=["unbuffered", "buffered"]
)
def test_a_full_device_is_one_line(arguments, unbuffered):
    assert_one_line(process(*arguments, redirect=">/dev/full", unbuffered=unbuffered), FULL)


def test_a_closed_stdout_is_one_line_before_any_work():
    assert_one_line(
        process(*MEMORY, redirect=">&-"),
        "kvq: error: stdout is closed; redirect it to a file or /dev/null",
    )


@pytest.mark.parametrize(
    "arguments",
    [("chat", "embedded"), ("generate", "embedded", "--prompt-file", "-")],
    ids=" ".join,
)
def test_a_closed_stdin_is_one_line_before_any_work(arguments, run, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after `<&-`
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err == ("kvq: error: stdin is closed; redirect it from a file, a pipe or a terminal\n")


def test_a_stdin_that_cannot_be_read_is_one_line(tmp_path, run, monkeypatch):
    with (tmp_path / "written").open("w") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        code, out, err = run("generate", "embedded", "--prompt-file", "-")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvq: error: stdin cannot be read: ")


def test_a_closed_stderr_is_no_error():
    code, out, _ = process(*MEMORY, redirect="2>&-")
    assert code == 0
    assert "kivi:bits=2" in out
    assert process("memory", "nowhere", "--cache", "dense", redirect="2>&-") == (2, "", "")


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2</dev/null"], ids=["full", "only read"])
def test_messages_that_cannot_be_written_end_no_work(redirect):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    code, out, _ = process(*MEMORY, redirect=redirect)
    assert code == 0
    assert "kivi:bits=2" in out
    assert process("memory", "nowhere", "--cache", "dense", redirect=redirect)[0] == 2


def test_a_reader_that_leaves_is_no_error():
    assert process("methods", redirect="| head -1")[2] == ""


CHOOSES = {
    generate.ONE: ("--prompt", "a"),
    generate.SAVED: ("--from", "f"),
    generate.MANY: ("--prompts", "f"),
}
VALUES = {"stream": (), "out": ("o",), "mesh": ("heads=2",)}


@pytest.mark.parametrize("mode", CHOOSES, ids=lambda mode: mode.name)
def test_generate_refuses_the_options_of_its_other_modes(mode, run):
    others = set().union(*(each.takes for each in generate.MODES)) - mode.takes
    assert len(others) >= 3
    for name in others:
        request = ("generate", "nowhere", *CHOOSES[mode], f"--{name}", *VALUES.get(name, ("2",)))
        code, out, err = run(*request)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"kvq: error: --{name} is for "), err
        assert err.endswith(f": {mode.why_not}\n")
    for name in mode.takes - {"out"}:
        request = ("generate", "nowhere", *CHOOSES[mode], f"--{name}", *VALUES.get(name, ("2",)))
        more = ("--out", "o") if mode is generate.MANY else ()
        assert "'nowhere' does not exist" in run(*request, *more)[2], name


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_characters_that_stdout_lacks_are_escapes(options, model, tmp_path, monkeypatch):
    """As on Windows, where a file and a pipe are not UTF-8."""
    folder = shutil.copytree(model, tmp_path / "caf\u00e9 \u65e5 \U0001f642")
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert main.main(["memory", str(folder), "--cache", "dense", *options]) == 0
    if options:
        assert json.loads(written.getvalue().decode("ascii"))["model"] == str(folder)
    else:
        assert "caf\u00e9 \\u65e5 \\U0001f642" in written.getvalue().decode("latin-1")
