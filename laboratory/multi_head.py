"""Convert a model whose query heads share KV heads to one in which each has its own, with the same
outputs: `python -m laboratory.multi_head --model smollm2 DIRECTORY`.

XQuant's headline is about models without shared heads, whose keys and values take twice the bytes
of the layer's input. No small one can be had, so KV heads are repeated here: keys and values of a
group's heads are equal, and a cache that stores them stores each of them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.model_names import add_model
from kvq_jax.files.whole import replacing_directory
from kvq_models import load_llama
from kvq_models.llama.checkpoint import save_llama

PROJECTIONS = ".k_proj.", ".v_proj."


def repeated(tensor: np.ndarray, heads: int, times: int) -> np.ndarray:
    """Repeat the rows of each head `times` times, the copies side by side: query heads of a group
    are neighbours.

    Args:
        tensor: a weight [heads * H, D] or a bias [heads * H].
    """
    of_head = tensor.reshape(heads, -1, *tensor.shape[1:])
    return np.repeat(of_head, times, axis=0).reshape(-1, *tensor.shape[1:])


def convert(model: str, directory: pathlib.Path) -> None:
    """Write the converted model in float32, with its tokenizer."""
    llama, tokenizer = load_llama(model, dtype="float32", weights="dense")
    heads, of_queries = llama.config.num_key_value_heads, llama.config.num_attention_heads
    with replacing_directory(directory) as unfinished:
        save_llama(llama, unfinished, tokenizer)
        file, config = unfinished / "model.safetensors", unfinished / "config.json"
        tensors = {
            name: repeated(tensor, heads, of_queries // heads)
            if any(part in name for part in PROJECTIONS)
            else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
        fields = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(
            json.dumps(fields | {"num_key_value_heads": of_queries}), encoding="utf-8"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.multi_head", description=(__doc__ or "").partition(":")[0]
    )
    add_model(parser)
    parser.add_argument("directory", type=pathlib.Path, help="where the converted model goes")
    options = parser.parse_args(argv)
    convert(options.model, options.directory)
    print(options.directory)


if __name__ == "__main__":
    main()
