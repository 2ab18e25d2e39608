"""The name of this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FIELDS = "model name", "cpu family", "model"


def processor_name() -> str:
    """Return the processor's name with its family and model, which tell processors apart whose name
    a hypervisor shortens ("AMD EPYC"). The platform's name for it, which may be "", if the system
    does not list them."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))
    facts = {name.strip(): value.strip() for name, _, value in pairs}  # of the first processor
    name, family, model = (facts.get(field, "") for field in FIELDS)
    if not name:
        return platform.processor()
    return f"{name}, family {family} model {model}" if family and model else name
