"""Render chat templates in a process of their own, with limits of time and memory.

A template is a program from a checkpoint. Jinja's sandbox keeps it from reading files, but one
expression such as 10 ** (10 ** 8) computes for minutes inside of one call, during which no other
thread of the process runs.

    to the process     {"template", "messages", "names", "most", "seconds"}, one line of JSON each
    from it            {"text"} or {"error"}
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

SECONDS, MEMORY = 10, 2 << 30  # of one template; bytes of the process
START_SECONDS = 120


class TemplateError(ValueError):
    """A template does not render a conversation."""


class TemplateProcess:
    """The process, which starts when it is needed and again after a template has exceeded a limit.
    Use it from one thread."""

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, template: str, messages: list[dict[str, str]], names: dict[str, Any], most: int
    ) -> str:
        """Return the text of a conversation up to the beginning of the next answer.

        Args:
            template: in Jinja.
            messages: with `role` and `content`.
            names: what else the template can read.
            most: characters of the longest text.

        Raises TemplateError, in one line.
        """
        asked = dict(template=template, messages=messages, names=names, most=most)
        answer = self._answer(json.dumps(asked | {"seconds": self._seconds}).encode() + b"\n")
        if answer is None:
            self.close()
            raise TemplateError(
                f"the chat template takes more than {self._seconds:g} s or {MEMORY >> 30} GiB"
            )
        if "text" not in answer:
            raise TemplateError(f"the tokenizer's chat template fails: {answer['error']}")
        return answer["text"]

    def start(self) -> None:
        """Start the process, which takes about a second."""
        if self._process is not None:
            return
        environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": _path()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the server, which still answers
        )

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes and waits
                pass

    def _answer(self, line: bytes) -> dict[str, str] | None:
        """Return the process's answer, or None if it exceeds a limit."""
        if self._process is None:
            self.start()
            if self._line(b"", START_SECONDS) == b"":
                self.close()
                raise TemplateError("the process that renders chat templates does not start")
        answer = self._line(line, self._seconds)
        return json.loads(answer) if answer else None

    def _line(self, line: bytes, seconds: float) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return b""
        finally:
            timer.cancel()


def _path() -> str:
    """Return the folders in which this process finds its packages, for the same ones there."""
    return os.pathsep.join(folder or os.getcwd() for folder in sys.path)


def _limit(name: str, most: int) -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit("RLIMIT_AS", MEMORY)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        # if the server is killed, nobody else ends a template
        _limit("RLIMIT_CPU", int(sum(os.times()[:2]) + asked["seconds"]) + 2)
        try:
            (text,), _ = render_jinja_template(
                conversations=[asked["messages"]],
                chat_template=asked["template"],
                add_generation_prompt=True,
                **asked["names"],
            )
            answer = {"text": text}
            if len(text) > asked["most"]:
                answer = {"error": f"its text has more than {asked['most']} characters"}
        except Exception as error:  # a template may do anything
            answer = {"error": " ".join(str(error).split()) or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
