"""The sources of the documentation site: every public name has an entry, and every link leads to a
file that is there."""

import pathlib
import re

import kvq_jax
import kvq_models
from tools import documentation

LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def test_the_reference_has_every_public_name(tmp_path: pathlib.Path):
    documentation.write(tmp_path)
    for package in (kvq_jax, kvq_models):
        page = (tmp_path / f"reference/{package.__name__}.md").read_text(encoding="utf-8")
        entries = re.findall(rf"^::: {package.__name__}\.(\w+)$", page, re.MULTILINE)
        assert len(entries) == len(set(entries))
        assert set(entries) == set(package.__all__) - {"__version__"}


def test_every_link_of_the_site_leads_to_a_file(tmp_path: pathlib.Path):
    documentation.write(tmp_path)
    pages = list(tmp_path.rglob("*.md"))
    assert len(pages) > 50
    for page in pages:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.relative_to(tmp_path)}: {target}"


def test_a_link_to_a_folder_leads_to_its_readme_or_goes(tmp_path: pathlib.Path):
    page = documentation.ROOT / "docs/commands.md"
    text = "[waterfill](../kvq_jax/methods/waterfill#laws), [outputs](examples)"
    wanted = "[waterfill](../kvq_jax/methods/waterfill/README.md#laws), outputs"
    assert documentation.on_site(text, page, set()) == wanted
