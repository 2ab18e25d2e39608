"""One of two processes that hold a model and a cache together: python two_processes.py RANK PORT DIRECTORY. Prints what it generated."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np


def main(rank: int, port: str, directory: pathlib.Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank, initialization_timeout=60)

    import kvq_jax as kvq
    from kvq_jax.placement.allowed import parse
    from kvq_models import generate, load_llama, prepare

    placement = parse("heads=2,tokens=2")
    spec = "innerq:sink=4,recent=8,block=16"
    llama, _ = load_llama(directory / "model", dtype="float32", mesh=placement)
    llama = prepare(llama, spec)
    tokens = np.random.default_rng(0).integers(3, 90, (2, 50))
    cache = kvq.init_cache(spec, llama.config, 2, 128, placement=placement)
    first = generate(llama, cache, tokens, max_new_tokens=8)
    text = np.asarray(first.tokens).tolist()
    kvq.save_cache(first.cache, directory / "cache")
    loaded = kvq.trim(kvq.load_cache(directory / "cache", placement=placement), np.array([40, 40]))
    then = generate(llama, loaded, tokens[:, 40:], max_new_tokens=8)
    print(json.dumps({"first": text, "then": np.asarray(then.tokens).tolist()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
