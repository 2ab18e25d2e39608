"""The page at `/`: whole by itself, and what it reads is there. What it does with a server is in test_server.py."""

from __future__ import annotations

import importlib.resources
import re
from html.parser import HTMLParser

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
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data", "xlink:href")]
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
    assert not re.search(r"https?:|//[a-z]|@import|url\(|import\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE)


def test_every_element_that_the_script_names_is_there():
    ids, named = parsed().ids, set(re.findall(r'\bat\("(\w+)"\)', SCRIPT))
    assert len(ids) == len(set(ids))
    assert named == set(ids)
    assert len(named) > 15
