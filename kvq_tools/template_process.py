"""Render chat templates in a process of their own, with limits of time and memory.

A template is a program from a checkpoint. Jinja's sandbox keeps it from reading files, but one
expression such as 10 ** (10 ** 8) computes for minutes inside of one call, during which no other
thread of the process runs.

    to the process   {"number", "template", "messages", "names", "maximum", "continues", "seconds"}
    from it          {"number"}, with "text" or "error": one line of JSON each
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

SECONDS = 10  # limit for one template
MEMORY = 2 << 30  # limit for the process, in bytes
START_SECONDS = 120  # limit for the start of the process
READY = b"ready\n"


class TemplateError(ValueError):
    """A template does not render a conversation."""


class TemplateProcess:
    """The process, which starts when it is needed and again after a template has exceeded a limit.
    Use it from one thread."""

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._ready, self._number = False, 0

    def render(
        self,
        template: str,
        messages: list[dict[str, str]],
        names: dict[str, Any],
        maximum: int,
        *,
        continues: bool = False,
    ) -> str:
        """Return the text of a conversation up to the beginning of the next answer.

        Args:
            template: in Jinja.
            messages: with `role` and `content`.
            names: what else the template can read.
            maximum: characters of the longest text.
            continues: leave the last message open, and begin no answer.

        Raises TemplateError, in one line.
        """
        self._number += 1
        asked = dict(template=template, messages=messages, names=names, maximum=maximum)
        asked |= dict(number=self._number, continues=continues, seconds=self._seconds)
        answer = self._answer(json.dumps(asked).encode() + b"\n")
        if answer is None or answer.get("number") != self._number:
            self.close()
            raise TemplateError(
                f"the chat template takes more than {self._seconds:g} s or {MEMORY >> 30} GiB"
            )
        if "text" not in answer:
            raise TemplateError(f"the tokenizer's chat template fails: {answer['error']}")
        return answer["text"]

    def start(self) -> None:
        """Start the process, which takes about a second, and do not wait for it."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()  # something else may have ended it
        self._ready = False
        environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": _path()}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: no modules of the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the server, which still answers
        )

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # closes its pipes, one of which may hold what could not be written, and waits
            with contextlib.suppress(OSError), process:
                pass

    def _answer(self, line: bytes) -> dict[str, Any] | None:
        """Return the process's answer, or None if it exceeds a limit."""
        self.start()
        if not self._ready and self._line(b"", START_SECONDS) != READY:
            self.close()
            raise TemplateError("the process that renders chat templates does not start")
        self._ready = True
        answer = self._line(line, self._seconds)
        return json.loads(answer) if answer.endswith(b"\n") else None

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


def _limit(name: str, maximum: int) -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (maximum, resource.getrlimit(kind)[1]))


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit("RLIMIT_AS", MEMORY)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        # if the server is killed, nobody else ends a template
        _limit("RLIMIT_CPU", int(sum(os.times()[:2]) + asked["seconds"]) + 2)
        try:
            (text,), _ = render_jinja_template(
                conversations=[asked["messages"]],
                chat_template=asked["template"],
                add_generation_prompt=not asked["continues"],
                continue_final_message=asked["continues"],
                **asked["names"],
            )
            answer = {"text": text}
            if len(text) > asked["maximum"]:
                answer = {"error": f"its text has more than {asked['maximum']} characters"}
        except Exception as error:  # a template may do anything
            answer = {"error": " ".join(str(error).split()) or type(error).__name__}
        line = json.dumps(answer | {"number": asked["number"]})
        sys.stdout.buffer.write(line.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
