"""`make audit` tells faults from a network that is not there."""

import json

import pytest

from tools.audit import Report, main

FAULT = {"id": "PYSEC-2025-1", "fix_versions": ["3.1.6"]}


def report(*packages: dict) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


@pytest.mark.parametrize(
    ("reports", "code", "message"),
    [
        ({}, 0, "no source of advisories can be reached: nothing was audited"),
        ({"pypi": report({"name": "a", "skip_reason": "not found"})}, 0, "nothing was audited"),
        (
            {"osv": report({"name": "a", "version": "1", "vulns": []}, {"skip_reason": "local"})},
            0,
            "1 of 2 packages were looked up with osv: 0 have known faults",
        ),
        (
            {"pypi": report({"name": "jinja2", "version": "3.1.4", "vulns": [FAULT]})},
            1,
            "jinja2 3.1.4: PYSEC-2025-1, fixed in 3.1.6",
        ),
    ],
)
def test_an_audit_says_what_it_looked_up(
    reports: dict[str, str], code: int, message: str, capsys: pytest.CaptureFixture[str]
):
    unreachable = Report("", "ConnectionError: no route")
    answers = {service: Report(text) for service, text in reports.items()}
    assert main(lambda service: answers.get(service, unreachable)) == code
    out = capsys.readouterr().out
    assert message in out
    assert ("osv: ConnectionError: no route" in out) == ("nothing was audited" in out)


def test_options_that_pip_audit_does_not_know_are_no_lack_of_a_network(
    capsys: pytest.CaptureFixture[str],
):
    assert main(lambda service: Report("", "unrecognized arguments: --service", 2)) == 1
    assert "cannot be used: unrecognized arguments" in capsys.readouterr().out
