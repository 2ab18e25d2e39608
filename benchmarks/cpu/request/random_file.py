"""A GGUF file with random weights of a published model's shapes: the values of weights do not
change the speed, and no such model has to be fetched."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import gguf
import numpy as np

LLAMA_1B = "llama-3.2-1b"
LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 16, 2048, 8192, 32, 8, 64, 128256
POSITIONS, ROPE_BASE = 131072, 500000.0
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


def _blocks(
    rows: int, columns: int, kind: gguf.GGMLQuantizationType, random: np.random.Generator
) -> np.ndarray:
    """Return random codes whose values have a deviation of about 0.02."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random.integers(0, 256, (rows, columns // 32, size), np.uint8)
    scale = 0.0043 if kind == Q4_1 else 0.00027
    blocks[..., :2] = np.array([scale], np.float16).view(np.uint8)
    if kind == Q4_1:
        blocks[..., 2:4] = np.array([-7.5 * scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _shapes() -> Iterator[tuple[str, int, int]]:
    """Yield the name, the outputs and the inputs of each 4-bit matrix."""
    for i in range(LAYERS):
        yield f"blk.{i}.attn_q.weight", HEADS * HEAD_DIM, WIDTH
        yield f"blk.{i}.attn_k.weight", KV_HEADS * HEAD_DIM, WIDTH
        yield f"blk.{i}.attn_v.weight", KV_HEADS * HEAD_DIM, WIDTH
        yield f"blk.{i}.attn_output.weight", WIDTH, HEADS * HEAD_DIM
        yield f"blk.{i}.ffn_gate.weight", INNER, WIDTH
        yield f"blk.{i}.ffn_up.weight", INNER, WIDTH
        yield f"blk.{i}.ffn_down.weight", WIDTH, INNER


def written(file: pathlib.Path) -> pathlib.Path:
    """Write the file, whole or not at all, if it is not there. Returns it."""
    if file.exists():
        return file
    unfinished = file.with_suffix(".unfinished")
    writer, random = gguf.GGUFWriter(unfinished, "llama"), np.random.default_rng(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tokenizer_model("none")
    embedding = _blocks(VOCABULARY, WIDTH, Q8_0, random)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=Q8_0)
    norms = ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(LAYERS) for n in ("attn", "ffn"))]
    for norm in norms:
        writer.add_tensor(f"{norm}.weight", np.ones(WIDTH, np.float32))
    for name, outputs, inputs in _shapes():
        writer.add_tensor(name, _blocks(outputs, inputs, Q4_1, random), raw_dtype=Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(file)
    return file
