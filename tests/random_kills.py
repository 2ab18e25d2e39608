"""Kill a process that writes without end, at random moments, many times, and look at what is there then.

python -m tests.random_kills FOLDER KILLS
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time

import numpy as np
from safetensors import safe_open

from kvq_jax.files.checksum import read_tensors, save_tensors
from kvq_jax.files.whole import UNFINISHED, replacing_directory

FILE, TREE = "file.safetensors", "tree"


def write(folder: pathlib.Path, version: int) -> None:
    save_tensors(folder / FILE, {"numbers": np.full(60_000, version, np.int32)}, {"version": str(version)})
    with replacing_directory(folder / TREE) as unfinished:
        for name in ("one", "two"):
            (unfinished / name).write_text(f"{version} " * 20_000)


def damage(folder: pathlib.Path) -> list[str]:
    """Return what is not whole."""
    found = []
    try:
        with safe_open(folder / FILE, framework="numpy") as file:
            read_tensors(file, FILE, required=True)
    except Exception as error:  # whatever a damaged file is met with
        found.append(str(error))
    one, two = ((folder / TREE / name).read_text() for name in ("one", "two"))
    if one != two or one.count(" ") != 20_000:
        found.append(f"{TREE}: {len(one)} and {len(two)} characters")
    return found


def main(folder: pathlib.Path, kills: int) -> None:
    moments, damaged, unfinished = random.Random(0), [], 0
    write(folder, 0)
    for kill in range(kills):
        child = os.fork()
        if child == 0:
            parent, version = os.getppid(), 1000 * kill
            while os.getppid() == parent:  # a child whose parent was killed ends too
                version += 1
                write(folder, version)
            os._exit(0)
        time.sleep(moments.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        damaged += damage(folder)
        unfinished += any(folder.glob(f"{UNFINISHED}*"))
    write(folder, 0)
    print(json.dumps({"kills": kills, "damaged": damaged, "unfinished": unfinished}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
