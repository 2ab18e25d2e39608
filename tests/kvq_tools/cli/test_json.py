"""Every --json object names its format and version and is described in docs/json.md. Errors are
objects, too.

The fixture `run_json` compares every object that it reads with the page.
"""

import json
import os
import subprocess
import sys

import pytest

from kvq_tools.cli import main
from kvq_tools.cli.console import print_json
from tests.kvq_tools.cli.json_page import sections, undescribed_keys


@pytest.mark.parametrize(
    ("arguments", "format_"), [("methods kivi", "kvq.methods"), ("fetch", "kvq.models")]
)
def test_a_key_that_the_page_lacks_is_found(arguments, format_, run_json):
    found = run_json(arguments)
    assert found["format"] == format_
    assert undescribed_keys(found | {"new_key": 1}) == ["new_key"]


def test_the_page_has_a_section_for_every_command():
    shared = {"passkey": "task", "niah": "task", "ruler": "task"}
    assert {
        f"kvq.{shared.get(command, command)}"
        for command in main.COMMANDS
        if command not in main.PASSED_ON
    } <= set(sections())


def test_an_error_is_an_object_with_its_line_and_status(run):
    code, out, err = run("memory", "nowhere", "--cache", "dense", "--json")
    found = json.loads(out)
    assert (code, found["format"], found["version"], found["status"]) == (2, "kvq.error", 1, 2)
    assert err == f"kvq: error: {found['error']}\n"
    assert run("memory", "nowhere", "--cache", "dense")[1] == "", (
        "without --json stdout stays empty"
    )
    assert not undescribed_keys(found)


def test_a_stream_is_no_object(run):
    code, out, _ = run("generate", "embedded", "--prompt", "a", "--stream", "--json")
    assert code == 2
    assert json.loads(out)["error"].endswith("one object at the end: leave out one of them")


def test_an_interruption_is_an_object_too(run, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt("the same command goes on")

    monkeypatch.setattr("kvq_tools.cli.commands.methods.run", interrupted)
    code, out, err = run("methods", "--json")
    assert (code, json.loads(out)["error"]) == (130, "interrupted: the same command goes on")
    assert err == "kvq: interrupted: the same command goes on\n"


STUCK = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
from kvq_tools.cli import interruption
from kvq_tools.cli.commands import fetch  # which needs no JAX
from kvq_tools.cli.process import run

def stuck(_):  # as in XLA's compiler: the main thread does not see the press
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass

fetch.run = stuck
run()
"""


@pytest.mark.parametrize("json_", [True, False])
def test_an_interruption_that_the_main_thread_does_not_see_is_an_object_too(json_):
    options = ["fetch", *(["--json"] if json_ else [])]
    process = subprocess.run(
        [sys.executable, "-c", STUCK, *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        timeout=120,
    )
    assert (process.returncode, process.stderr) == (130, "kvq: interrupted\n")
    expected = {"format": "kvq.error", "version": 1, "error": "interrupted", "status": 130}
    assert process.stdout == (f"{json.dumps(expected, indent=2)}\n" if json_ else "")


def test_control_characters_in_an_object_are_escapes(capsys):
    """A terminal obeys none of them, and a reader gets the original text back."""
    controls = *range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)
    text = "".join(map(chr, (*controls, 0xD800))) + "é漢🙂"
    print_json("test", {"text": text, text: ["list", text]})
    out = capsys.readouterr().out
    shown = sorted({ch for ch in out if not ch.isprintable()})
    assert shown == ["\n"], "what stands in the output as it is"
    assert "é漢🙂" in out
    found = json.loads(out)
    assert found["text"] == text
    assert found[text] == ["list", text]
