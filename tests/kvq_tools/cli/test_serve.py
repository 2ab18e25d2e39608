"""`kvq serve` as a process: it prints its address, and SIGTERM ends it once accepted requests are
answered."""

import argparse
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from kvq_models.inference.engine.requests import Reason
from kvq_tools.cli.commands import serve
from kvq_tools.serving.service import largest_body
from kvq_tools.serving.sockets import bound_socket, let_restart
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error


def test_the_last_line_counts_whole_answers_and_names_the_others():
    ended: dict[Reason, int] = {"length": 2, "cancelled": 3, "ended": 1, "failed": 0}
    line = serve.footer(70, ended)
    assert line == "[70 tokens in 3 answers, 3 cancelled; stopped]"
    assert serve.footer(1, {"ended": 1}) == "[1 token in 1 answer; stopped]"


@pytest.mark.parametrize(
    ("capacity", "bytes_"), [(1, 1 << 20), (4096, 4 << 20), (1 << 20, 8 << 20)]
)
def test_the_largest_body_grows_with_the_capacity(capacity: int, bytes_: int):
    assert largest_body(capacity) == bytes_


def test_spaces_around_a_key_are_not_part_of_it():
    # no client can send them: HTTP drops spaces at the ends of a header
    assert serve._api_keys(argparse.Namespace(api_key=[" one", "two\n"])) == ["one", "two"]


@pytest.fixture
def serving(model: pathlib.Path, tmp_path: pathlib.Path):
    """Return a process of `kvq serve` with a random model, and the facts that it printed when it
    was ready."""
    command = "serve . --cache=kivi:bits=2 --port=0 --slots 2 --capacity 192"
    command += f" --json --prefix-dir {tmp_path / 'prefixes'} --prefix-disk 1MiB"
    environment = os.environ | {"KVQ_API_KEY": "from-the-environment\r"}  # of a file of Windows
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq_tools", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=model,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            break
    yield process, json.loads("".join(lines) or "{}")
    process.kill()
    process.communicate()


def test_a_server_answers_what_it_accepted_after_sigterm(
    serving, model: pathlib.Path, tmp_path: pathlib.Path
):
    process, facts = serving
    assert facts["format"] == "kvq.serve", process.communicate()[1]
    asked = {"name": model.name, "slots": 2, "capacity": 192, "cache": "kivi"}
    assert facts.items() >= asked.items()
    assert facts["cache_bytes"] > 0
    port = int(facts["url"].rpartition(":")[2])
    headers = {"authorization": "Bearer from-the-environment", "content-type": "application/json"}
    assert largest_body(facts["capacity"]) == 1 << 20
    large = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    large.request("POST", "/v1/completions", None, headers | {"content-length": f"{(1 << 20) + 1}"})
    assert large.getresponse().status == 413
    large.close()
    connections = []
    for n in range(6):  # four of them wait in the queue
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        fields = {
            "model": model.name,
            "prompt": "the cat is",
            "max_tokens": 120 + n,
            "temperature": 0,
        }
        body = json.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}})
        connection.request("POST", "/v1/completions", body, headers)
        connections.append(connection)
    answers = [connection.getresponse() for connection in connections]  # headers: all are accepted
    process.send_signal(signal.SIGTERM)
    for n, answer in enumerate(answers):
        assert answer.status == 200
        events = answer.read().decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]", f"{n=}: {events[-3:]}"
        usage = json.loads(events[-2].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 120 + n
        connections[n].close()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors, errors
    with pytest.raises(OSError, match="refused"):
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
    assert len(list((tmp_path / "prefixes").glob("*.safetensors"))) == 1, (
        "the prompt is not on disk for the next server"
    )


def test_a_port_that_is_taken_is_one_line(run, model: pathlib.Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert_one_line_error(run("serve", model, "--port", other.getsockname()[1]), "in use")


def test_a_port_is_held_while_a_model_loads_and_can_be_had_again_after():
    bound = bound_socket("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with pytest.raises(OSError, match=f"port {port} of 127.0.0.1.*in use"):
        bound_socket("127.0.0.1", port)
    let_restart(bound)
    bound.listen()
    with socket.create_connection(("127.0.0.1", port)), bound.accept()[0]:
        bound.close()
    bound_socket("127.0.0.1", port).close()  # the connection that the server closed lingers
