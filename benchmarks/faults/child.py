"""The process that injects faults of one kind, for benchmarks.faults: a line of JSON for each.

    python -m benchmarks.faults.child KIND FIRST END CONTROLS SECONDS

It begins no injection after SECONDS, and controls come last.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.kinds import KINDS


def main() -> None:
    name, (first, end, controls, seconds) = sys.argv[1], map(int, sys.argv[2:])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing else writes there
    due = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, KINDS[name].kind()(Path(folder)) as inject:
        print(json.dumps(["ready"]), file=lines)
        for checked, numbers in ((True, range(first, end)), (False, range(controls))):
            for number in numbers:
                if checked and time.monotonic() > due:
                    break
                print(json.dumps([checked, inject(number, checked)]), file=lines)
        print(json.dumps(["done"]), file=lines)


if __name__ == "__main__":
    main()
