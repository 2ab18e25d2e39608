"""The page at `/` is self-contained, everything that it reads exists, and it shows the API's
answers."""

import importlib.resources
import json
import pathlib
import re
import shutil
import subprocess
from html.parser import HTMLParser

import openai
import pytest

from tests.kvq_tools.serving.running import CAPACITY, KEY, NAME, QUEUE, SLOTS, Running

PAGE = (importlib.resources.files("kvq_tools.serving") / "page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]


class Elements(HTMLParser):
    """ids, and addresses of whatever an element would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.loaded += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "action", "data", "xlink:href")
        ]
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"


def parsed() -> Elements:
    elements = Elements()
    elements.feed(PAGE)
    elements.close()
    return elements


def test_the_page_loads_nothing_from_elsewhere():
    elements = parsed()
    assert elements.open == []
    assert elements.loaded == ["data:,"]
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(|import\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(",
        PAGE,
    )


def test_every_element_that_the_script_names_is_there():
    ids, named = parsed().ids, set(re.findall(r'\bat\("(\w+)"\)', SCRIPT))
    assert len(ids) == len(set(ids))
    assert named == set(ids)
    assert len(named) > 15


def test_the_page_needs_no_key_and_what_it_reads_is_there(server: Running):
    status, headers, body = server.raw("GET", "/", headers={"authorization": ""})
    assert (status, body.decode()) == (200, PAGE)
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["content-security-policy"]
    metrics = server.raw("GET", "/metrics")[2].decode()
    told = set(re.findall(r"^(kvq_\w+)", metrics, re.MULTILINE))
    read = set(re.findall(r"\bkvq_\w+", SCRIPT))
    assert read <= told, read - told
    assert len(read) > 12
    assert re.search(r'^kvq_cache_info\{.*spec="kivi:recent=16"', metrics, re.MULTILINE)
    for path in re.findall(r'fetch\("([^"]+)"', SCRIPT):
        assert server.raw("GET", f"/{path}")[0] == 200, path
    assert server.raw("GET", "/metrics", headers={"authorization": ""})[0] == 401, (
        "what the page reads asks for the key"
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_talks_with_the_model_and_watches_the_server(
    server: Running, client: openai.OpenAI
):
    def driven(key: str) -> dict:
        driver = pathlib.Path(__file__).with_name("page_driver.mjs")
        done = subprocess.run(
            ["node", driver, server.url, key],
            input=SCRIPT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found, said, turns = driven(KEY), [], []
    asked = dict(model=NAME, temperature=0, max_tokens=12)
    for text in ("Name a river.", "And another."):
        said.append({"role": "user", "content": text})
        answer = client.chat.completions.create(messages=said, **asked).choices[0].message.content
        said.append({"role": "assistant", "content": answer})
        turns += [("turn user", text), ("turn assistant", answer)]
    continued = client.completions.create(prompt="It is a truth", **asked).choices[0].text
    turns += [("turn user", "It is a truth"), ("turn assistant", continued)]
    assert [(role, text) for role, text, *_ in found["log"]] == turns
    assert found["log"][1][2].startswith("token limit reached, first text after ")
    told = found["told"]
    assert (told["model"], told["cache"], told["state"]) == (NAME, "kivi:recent=16", "")
    assert (told["capacity"], told["waiting"]) == (str(SLOTS * CAPACITY), f"0 of {QUEUE}")
    assert found["slots"].endswith(f"of {SLOTS} slots are taken")
    assert float(told["new"]) >= 0
    assert min(float(point.partition(",")[2]) for point in found["curve"].split()) < 19, (
        "no tokens were seen"
    )
    assert "API key" in driven("")["told"]["state"], "nobody is told that a key is missing"
