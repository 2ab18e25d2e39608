"""A headless browser, driven through WebDriver: chromium and its chromedriver, if the machine has
both."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1200,800",
)


class Browser:
    """One window. Elements are named by their ids."""

    def __init__(self, driver: str):
        options = {"binary": CHROMIUM, "args": ARGUMENTS}
        asked = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self._url = f"{driver}/session"
        self._url += "/" + self._call("POST", "", capabilities={"alwaysMatch": asked})["sessionId"]

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        body = json.dumps(fields).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._url + path, body, {"content-type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]

    def open(self, url: str) -> None:
        self._call("POST", "/url", url=url)

    def evaluate(self, expression: str) -> Any:
        return self._call("POST", "/execute/sync", script=f"return {expression}", args=[])

    def until(self, expression: str) -> Any:
        """Return the value of an expression of the page as soon as it is true."""
        end = time.monotonic() + 60
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} does not come true"
            time.sleep(0.05)
        return found

    def type(self, name: str, text: str) -> None:
        """Replace the text of a field by typing."""
        self._on(name, "clear")
        self._on(name, "value", text=text)

    def click(self, name: str) -> None:
        self._on(name, "click")

    def _on(self, name: str, action: str, **fields: Any) -> None:
        (element,) = self._call("POST", "/element", using="css selector", value=f"#{name}").values()
        self._call("POST", f"/element/{element}/{action}", **fields)

    def complaints(self) -> list[str]:
        """Return the browser's console messages since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", type="browser")]

    def close(self) -> None:
        self._call("DELETE", "")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    process = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        port = next(
            match[1]
            for line in process.stdout
            if (match := re.search(r"started successfully on port (\d+)", line))
        )
        with contextlib.closing(Browser(f"http://127.0.0.1:{port}")) as window:
            yield window
    finally:
        process.terminate()
        process.communicate(timeout=30)
