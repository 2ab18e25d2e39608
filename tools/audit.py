"""Look for known faults of the installed packages, which `make audit` does.

    python -m tools.audit

pip-audit asks PyPI for its advisories, then OSV. Without a network it skips every package and finds
nothing, so this program says how many were looked up. The exit code is 1 if a package has a fault.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SERVICES, SECONDS = ("pypi", "osv"), 600

Audit = Callable[[str], str]  # from a service to the JSON of pip-audit


def audited(service: str) -> str:
    """Return the report of pip-audit on this environment, or "" if there is none."""
    command = [sys.executable, "-m", "pip_audit", "--service", service, "--format", "json"]
    command += ["--progress-spinner", "off", "--skip-editable"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout
    except subprocess.TimeoutExpired:
        return ""


def main(audit: Audit = audited) -> int:
    for service in SERVICES:
        try:
            packages: list[dict[str, Any]] = json.loads(audit(service))["dependencies"]
        except ValueError:  # the service cannot be reached
            continue
        known = [package for package in packages if "skip_reason" not in package]
        if not known:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
