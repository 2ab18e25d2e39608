"""Look for known faults of the installed packages, which `make audit` does.

    python -m tools.audit

pip-audit asks PyPI for its advisories, then OSV. Without a network it skips every package and finds
nothing, so this program says how many were looked up, and why none was. The exit code is 1 if a
package has a fault, or if pip-audit does not understand what it is told.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

SERVICES, SECONDS = ("pypi", "osv"), 600
MISUSED = 2  # the exit code of argparse


class Report(NamedTuple):
    """text: the JSON of pip-audit, "" if there is none. error: what it says about that. code: its
    exit code."""

    text: str
    error: str = ""
    code: int = 0


Audit = Callable[[str], Report]  # from a service


def audited(service: str) -> Report:
    """Return the report of pip-audit on this environment."""
    if importlib.util.find_spec("pip_audit") is None:
        return Report("", "pip-audit is not installed")
    command = [sys.executable, "-m", "pip_audit", "-s", service, "--format", "json"]
    command += ["--progress-spinner", "off", "--skip-editable"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Report("", f"no answer within {SECONDS} s")
    return Report(
        done.stdout, (done.stderr.strip() or "no report").splitlines()[-1], done.returncode
    )


def main(audit: Audit = audited) -> int:
    reasons = []
    for service in SERVICES:
        report = audit(service)
        if report.code == MISUSED:
            print(f"pip-audit cannot be used: {report.error}")
            return 1
        try:
            packages: list[dict[str, Any]] = json.loads(report.text)["dependencies"]
        except (ValueError, KeyError, TypeError):  # the service cannot be reached
            reasons.append(f"{service}: {report.error}")
            continue
        known = [package for package in packages if "skip_reason" not in package]
        if not known:
            reasons.append(f"{service}: it knows none of {len(packages)} packages")
            continue
        faulty = [package for package in known if package["vulns"]]
        for package in faulty:
            for fault in package["vulns"]:
                fixed = ", ".join(fault.get("fix_versions", ())) or "no version yet"
                print(f"{package['name']} {package['version']}: {fault['id']}, fixed in {fixed}")
        print(
            f"{len(known)} of {len(packages)} packages were looked up with {service}:"
            f" {len(faulty)} have known faults"
        )
        return 1 if faulty else 0
    print("no source of advisories can be reached: nothing was audited")
    print(*reasons, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
