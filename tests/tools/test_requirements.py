"""What the environments of the Makefile install."""

import pytest
from packaging.requirements import Requirement

from tools.requirements import ENVIRONMENTS, main, requirements

PROJECT = {
    "dependencies": ["jax>=0.10.2", "safetensors>=0.7"],
    "optional-dependencies": {
        "models": ["flax>=0.12.1", "safetensors>=0.8"],
        "tools": ["kvq-jax[models]", "rich>=13,<15"],
        "serve": ["kvq-jax[tools]", "fastapi>=0.129.0"],
        "report": ["kvq-jax[tools]", "matplotlib>=3.9"],
        "sentencepiece": ["kvq-jax[models]", "sentencepiece>=0.2.1"],
        "test": ["kvq-jax[serve]", "pytest>=9"],
        "docs": ["mkdocs>=1.6,<2"],
        "hosts": ["google-tunix==0.1.7"],
    },
}


def test_the_lowest_versions_are_those_that_the_strictest_extra_allows():
    assert requirements("lowest", PROJECT) == [
        "jax==0.10.2",
        "safetensors==0.8",
        "flax==0.12.1",
        "rich==13,<15",
        "fastapi==0.129.0",
        "matplotlib==3.9",
        "sentencepiece==0.2.1",
        "pytest>=9",
    ]


def test_documentation_needs_no_kvq_and_hosts_the_library_alone():
    assert requirements("docs", PROJECT) == ["mkdocs>=1.6,<2"]
    assert requirements("hosts", PROJECT) == [
        "jax>=0.10.2",
        "safetensors>=0.7",
        "google-tunix==0.1.7",
    ]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_pip_can_read_what_pyproject_makes(environment, capsys):
    main([environment])
    lines = capsys.readouterr().out.split()
    named = [Requirement(line) for line in lines]
    assert not any(one.name == "kvq-jax" for one in named), "it is not installed there"
    if environment == "lowest":
        pinned = [one for one in named if str(one.specifier).startswith("==")]
        assert {"jax", "flax", "transformers", "fastapi"} <= {one.name for one in pinned}
