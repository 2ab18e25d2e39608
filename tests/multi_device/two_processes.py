"""One of two processes that hold a model and a cache together: python two_processes.py RANK PORT
DIRECTORY. Prints what it found, as JSON.

At last process 1 kills itself in the middle of a stream, and process 0 waits for it.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable

import jax
import numpy as np

HEARTBEAT = 10  # seconds without a sign of life after which a process is taken for dead


def main(rank: int, port: str, directory: pathlib.Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", 2, rank, initialization_timeout=60, heartbeat_timeout_seconds=HEARTBEAT
    )

    import kvq_jax as kvq
    from kvq_jax.placement.allowed import parse
    from kvq_models import generate, generate_stream, load_llama, prepare
    from kvq_models.llama.hf_directory import HfDirectory

    read = 0
    parts = HfDirectory.parts

    def counted(self: HfDirectory, name: str) -> Callable[[tuple[slice, ...]], np.ndarray]:
        def one(index: tuple[slice, ...]) -> np.ndarray:
            nonlocal read
            found = parts(self, name)(index)
            read += found.nbytes
            return found

        return one

    HfDirectory.parts = counted
    placement = parse("heads=2,tokens=2")
    spec = "innerq:sink=4,recent=8,block=16"
    llama, _ = load_llama(directory / "model", dtype="float32", mesh=placement)
    held = sum(
        sum({str(s.index): s.data.nbytes for s in leaf.addressable_shards}.values())
        for leaf in jax.tree.leaves(llama)
    )
    prepared = prepare(llama, "xquant").cache_parameters
    tokens = np.random.default_rng(0).integers(3, 90, (2, 50))

    def new_cache() -> kvq.cache.Cache:
        return kvq.init_cache(spec, llama.config, 2, 128, placement=placement)

    first = generate(llama, new_cache(), tokens, max_new_tokens=20)
    text = np.asarray(first.tokens).tolist()
    kvq.files.save(first.cache, directory / "cache")
    trimmed = kvq.rows.trim(
        kvq.files.load(directory / "cache", placement=placement), np.array([40, 40])
    )
    kvq.files.save(trimmed, directory / "trimmed")
    found = {
        "read": read,
        "held": held,
        "written": text,
        "prepared": [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(prepared)],
    }
    for streamed in generate_stream(llama, new_cache(), tokens, max_new_tokens=20):
        found["streamed"] = np.asarray(streamed.tokens).tolist()
    print(json.dumps(found), flush=True)

    for i, _ in enumerate(generate_stream(llama, new_cache(), tokens, max_new_tokens=20)):
        if rank == 1 and i == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    print("the stream came to its end", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
