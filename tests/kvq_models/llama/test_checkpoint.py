"""Checkpoints in and out without torch, and every way in which one can be broken: one line that
names the file or the tensor."""

import dataclasses
import json
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvq_models.llama import checkpoint, hf_names
from kvq_models.llama.checkpoint import load_llama, open_checkpoint, read_config, save_llama
from kvq_models.llama.hf_directory import HfDirectory
from kvq_models.llama.model import Llama, abstract_llama
from kvq_models.llama.tensor_names import EMBED_NAME, HEAD_NAME
from tests.kvq_models.checkpoints import LONGROPE, STORIES, random_llama, tiny_config
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal

CONFIGS = {
    "llama_biases": tiny_config(attention_bias=True, mlp_bias=True),
    "llama_tied": tiny_config(tie_word_embeddings=True),
    "mistral": tiny_config("mistral"),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3", attention_bias=True),
    "olmo2": tiny_config("olmo2"),
}
ALL_CONFIGS = CONFIGS | {
    "phi3": tiny_config("phi3", partial_rotary_factor=0.75, rope_scaling=LONGROPE),
    "gpt_oss": tiny_config(
        "gpt_oss", num_local_experts=3, num_experts_per_tok=2, head_dim=16, sliding_window=8
    ),
}


def assert_same_weights(got: Llama, want: Llama) -> None:
    assert got.config == want.config
    got_weights, want_weights = hf_names.weights(got), hf_names.weights(want)
    assert got_weights.keys() == want_weights.keys()
    for path, weight in want_weights.items():
        assert got_weights[path].leaf.dtype == weight.leaf.dtype, path
        np.testing.assert_array_equal(got_weights[path].leaf, weight.leaf, err_msg=path)


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_a_saved_model_loads_back_bit_for_bit(name, tmp_path):
    llama = random_llama(ALL_CONFIGS[name], dtype=jnp.bfloat16)
    save_llama(llama, tmp_path)
    loaded, tokenizer = load_llama(tmp_path, dtype="bfloat16")
    assert tokenizer is None
    assert_same_weights(loaded, llama)
    assert read_config(tmp_path) == llama.config


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("vocab_size", {"vocab"}),
        ("hidden_size", {"model"}),
        ("intermediate_size", {"mlp"}),
        ("num_attention_heads", {"heads"}),
        ("num_key_value_heads", {"kv_heads"}),
        ("head_dim", {"heads", "kv_heads", "channels"}),
    ],
)
def test_axes_of_weights_are_called_what_they_run_along(field: str, names: set[str]):
    """If one size of a model doubles, exactly the axes of these names double."""
    for config in CONFIGS.values():
        doubled = dataclasses.replace(config, **{field: 2 * getattr(config, field)})
        larger = hf_names.weights(abstract_llama(doubled))
        for path, weight in hf_names.weights(abstract_llama(config)).items():
            pairs = zip(weight.spec.names, weight.leaf.shape, larger[path].leaf.shape, strict=True)
            assert all(
                (b == 2 * a) == (name in names) and b in (a, 2 * a) for name, a, b in pairs
            ), path


def test_weights_are_cast_to_the_asked_dtype_to_nearest(saved):
    exact = hf_names.weights(load_llama(saved, dtype="float32")[0])
    for path, weight in hf_names.weights(load_llama(saved, dtype="bfloat16")[0]).items():
        rounded = exact[path].leaf.astype(jnp.bfloat16)
        np.testing.assert_array_equal(weight.leaf, rounded, err_msg=path)


def test_shards_load_with_and_without_an_index(saved):
    whole, _ = load_llama(saved, dtype="float32")
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, saved / file)
    assert_same_weights(load_llama(saved, dtype="float32")[0], whole)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    (saved / "another.safetensors").write_bytes(b"not listed in the index")
    assert_same_weights(load_llama(saved, dtype="float32")[0], whole)


def test_a_tied_checkpoint_may_store_its_head_twice(tmp_path):
    llama = random_llama(tiny_config(tie_word_embeddings=True))
    save_llama(llama, tmp_path)
    change_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()})
    )
    assert_same_weights(load_llama(tmp_path, dtype="float32")[0], llama)


def test_a_head_is_compared_with_the_embedding_a_part_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_COMPARED", 10)
    llama = random_llama(tiny_config(tie_word_embeddings=True))
    save_llama(llama, tmp_path)
    change_tensors(tmp_path, lambda t: t.update({HEAD_NAME: t[EMBED_NAME].copy()}))
    read, whole = HfDirectory.read, list[str]()

    def recorded(directory: HfDirectory, name: str) -> np.ndarray:
        whole.append(name)
        return read(directory, name)

    monkeypatch.setattr(HfDirectory, "read", recorded)
    assert_same_weights(load_llama(tmp_path, dtype="float32", weights="dense")[0], llama)
    assert whole.count(EMBED_NAME) == 1
    assert HEAD_NAME not in whole
    change_tensors(tmp_path, lambda t: t[HEAD_NAME].__setitem__((-1, -1), 7.0))
    assert not load_llama(tmp_path)[0].config.tie_word_embeddings


def test_a_tied_config_with_a_head_of_its_own_is_untied(tmp_path):
    untied = random_llama(tiny_config())
    save_llama(untied, tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    assert_same_weights(load_llama(tmp_path, dtype="float32")[0], untied)


def share(directory: pathlib.Path, kept: str, dropped: str, *, metadata: bool) -> None:
    """Store one of two equal tensors, as `safetensors.torch.save_model` does. The other's name is
    in the metadata."""
    tensors = load_file(directory / "model.safetensors")
    tensors.setdefault(kept, tensors[EMBED_NAME])
    del tensors[dropped]
    fields = {"format": "pt"} | ({dropped: kept} if metadata else {})
    save_file(tensors, directory / "model.safetensors", metadata=fields)


@pytest.mark.parametrize("metadata", [True, False])
def test_a_tied_checkpoint_may_store_its_head_alone(metadata, tmp_path):
    llama = random_llama(tiny_config(tie_word_embeddings=True))
    save_llama(llama, tmp_path)
    share(tmp_path, HEAD_NAME, EMBED_NAME, metadata=metadata)
    assert_same_weights(load_llama(tmp_path, dtype="float32")[0], llama)


@pytest.mark.parametrize(("kept", "dropped"), [(HEAD_NAME, EMBED_NAME), (EMBED_NAME, HEAD_NAME)])
def test_weights_that_share_a_tensor_in_an_untied_model_need_the_metadata(kept, dropped, tmp_path):
    llama = random_llama(tiny_config())
    llama.head.kernel[...] = llama.embed[...].T
    save_llama(llama, tmp_path)
    share(tmp_path, kept, dropped, metadata=True)
    assert_same_weights(load_llama(tmp_path, dtype="float32")[0], llama)
    change_tensors(tmp_path, lambda t: None)  # written anew, without metadata
    assert f"the files lack tensor '{dropped}'" in refusal(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(saved):
    whole, _ = load_llama(saved, dtype="float32")
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    change_tensors(saved, lambda t: t.update(buffers))
    assert_same_weights(load_llama(saved, dtype="float32")[0], whole)


def test_saving_replaces_an_older_checkpoint_and_leaves_no_other_files(saved):
    llama = random_llama(tiny_config(num_hidden_layers=1), seed=1)
    save_llama(llama, saved)
    assert_same_weights(load_llama(saved, dtype="float32")[0], llama)
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1, (
        "others may read one of the files alone"
    )


def test_parameters_of_a_cache_method_are_not_saved(tmp_path):
    llama = random_llama(tiny_config())
    prepared = jax.tree.map(lambda leaf: leaf, llama)
    prepared.cache_parameters = (jnp.ones(3),)
    save_llama(prepared, tmp_path)
    assert_same_weights(load_llama(tmp_path, dtype="float32")[0], llama)


def test_the_tokenizer_is_loaded_and_saved(tmp_path):
    if not STORIES.is_dir():
        pytest.skip(f"no checkpoint at {STORIES}")
    llama, tokenizer = load_llama(STORIES)
    save_llama(llama, tmp_path, tokenizer)
    _, again = load_llama(tmp_path)
    text = "Once upon a time"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert again(text).input_ids == tokenizer(text).input_ids


def test_a_sentencepiece_tokenizer_alone_is_read(saved, tmp_path):
    missing = "the extra sentencepiece is not installed"
    sentencepiece = pytest.importorskip("sentencepiece", reason=missing)
    text = "the cat sat on the mat and the dog sat on the log"
    (tmp_path / "text.txt").write_text("\n".join([text] * 20))
    options = {"vocab_size": 40, "model_type": "bpe", "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(saved / "tokenizer"), **options
    )
    (saved / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    _, tokenizer = load_llama(saved)
    model = sentencepiece.SentencePieceProcessor(model_file=str(saved / "tokenizer.model"))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert ids == model.encode(text), "the text is cut in another way"
    assert tokenizer(text).input_ids == [model.bos_id(), *ids]
    (saved / "tokenizer_config.json").unlink()
    assert load_llama(saved)[1](text).input_ids == [model.bos_id(), *ids]
    (saved / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert load_llama(saved)[1](text).input_ids == ids


def test_experts_are_read_without_a_second_copy_of_all(tmp_path: pathlib.Path):
    """Also of files of several types, whose values all stay as they are."""
    counts = {"num_local_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    llama = random_llama(tiny_config("mixtral", sliding_window=None, **counts))
    save_llama(llama, tmp_path)
    weights = hf_names.weights(llama).values()
    weight = next(weight for weight in weights if weight.name.endswith("experts.*.w2.weight"))
    files = open_checkpoint(tmp_path)
    files.read(weight.stored_names[0])  # with what the library keeps
    tracemalloc.start()
    whole = checkpoint._whole(files, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * whole.nbytes
    assert np.array_equal(np.swapaxes(whole, -1, -2), weight.leaf)
    mixed = checkpoint._stacked([np.ones(1, np.float16), np.full(1, 0.1, np.float32)], 2)
    assert mixed[1, 0] == np.float32(0.1)
