"""docs/models.md names every family that loads."""

import pathlib
import re

from kvq_models.llama.families import FAMILIES
from tests.kvq_models.checkpoints import CASES

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_names_every_family_and_each_is_compared_with_transformers():
    named = set(re.findall(r"\(`(\w+)`\)", PAGE.read_text()))
    assert named == set(FAMILIES)
    assert {case.model_type for case in CASES.values()} == set(FAMILIES)
