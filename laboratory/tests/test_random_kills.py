"""Writers that are killed at random moments leave what was there whole, and work again.

KVQ_EVERY_STEP=1 kills each of them 40 times.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from laboratory.tests.random_kills import CARELESS
from tests.writers import WRITERS

ROOT = pathlib.Path(__file__).parents[2]
EVERY_STEP = "KVQ_EVERY_STEP" in os.environ
KILLS = 40 if EVERY_STEP else 3


def test_writers_leave_old_or_new_and_work_again(tmp_path: pathlib.Path):
    command = [sys.executable, "-m", "laboratory.tests.random_kills", str(tmp_path), str(KILLS)]
    path = f"{ROOT}{os.pathsep}{ROOT / 'models'}"
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.pop(CARELESS)["damaged"], "a file that is written in place is always whole"
    assert outcomes.keys() == WRITERS.keys()
    for name, outcome in outcomes.items():
        assert outcome["kills"] == KILLS, name
        assert outcome["damaged"] == [], name
        assert outcome["left"] == [], f"{name}: something is left, or missing"
    met = {name: outcome["unfinished"] for name, outcome in outcomes.items()}
    assert sum(met.values()) > 0, "no kill met a writer at work"
    assert not EVERY_STEP or all(met.values()), f"no kill met some writer at work: {met}"
