"""Checkpoints in and out without torch, and every way in which one can be broken: one line that
names the file or the tensor."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvq_jax as kvq
from kvq_models.llama import hf_names, weight_axes
from kvq_models.llama.checkpoint import CheckpointError, load_llama, read_config, save_llama
from kvq_models.llama.model import Llama, abstract_llama
from tests.kvq_models.checkpoints import STORIES, random_llama, tiny_config

CONFIGS = {
    "llama_biases": tiny_config(attention_bias=True, mlp_bias=True),
    "llama_tied": tiny_config(tie_word_embeddings=True),
    "mistral": tiny_config("mistral"),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3", attention_bias=True),
}


def assert_same_weights(got: Llama, want: Llama) -> None:
    assert got.config == want.config
    got_weights, want_weights = hf_names.weights(got), hf_names.weights(want)
    assert got_weights.keys() == want_weights.keys()
    for path, weight in want_weights.items():
        assert got_weights[path].leaf.dtype == weight.leaf.dtype, path
        np.testing.assert_array_equal(
            np.asarray(got_weights[path].leaf), np.asarray(weight.leaf), err_msg=path
        )


@pytest.fixture
def saved(tmp_path) -> pathlib.Path:
    save_llama(random_llama(tiny_config()), tmp_path)
    return tmp_path


def change_tensors(
    directory: pathlib.Path, change: Callable[[dict[str, np.ndarray]], object]
) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory: pathlib.Path, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(directory: pathlib.Path | str) -> str:
    with pytest.raises(CheckpointError) as error:
        load_llama(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the good ones


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_back_bit_for_bit(name, dtype, tmp_path):
    llama = random_llama(CONFIGS[name], dtype=jnp.dtype(dtype))
    save_llama(llama, tmp_path)
    loaded, tokenizer = load_llama(tmp_path, dtype=dtype)
    assert tokenizer is None
    assert_same_weights(loaded, llama)
    assert read_config(tmp_path) == llama.config


def test_every_weight_has_one_name_and_every_name_one_weight():
    paths = [path for _, path, _ in hf_names.TABLE]
    names = [name for name, _, _ in hf_names.TABLE]
    assert len(set(paths)) == len(set(names)) == len(hf_names.TABLE)
    used = {
        path.replace(".0.", ".#.")
        for config in CONFIGS.values()
        for path in hf_names.weights(random_llama(config))
        if ".1." not in path
    }
    assert used == set(paths), "the table and the modules differ"


def test_every_weight_has_axes_of_its_shape():
    assert set(weight_axes.TABLE) == {path for _, path, _ in hf_names.TABLE}
    for config in CONFIGS.values():
        abstract = abstract_llama(config, "bfloat16")
        for path, weight in hf_names.weights(abstract).items():
            assert (weight.spec.shape, weight.spec.dtype) == (
                weight.leaf.shape,
                weight.leaf.dtype.name,
            ), path
        assert kvq.nbytes(hf_names.describe(abstract)) == kvq.nbytes(abstract)


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
        np.testing.assert_array_equal(
            np.asarray(weight.leaf), np.asarray(exact[path].leaf.astype(jnp.bfloat16)), err_msg=path
        )


def test_shards_load_with_and_without_an_index(saved):
    whole, _ = load_llama(saved, dtype="float32")
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
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


def test_a_tied_config_with_a_head_of_its_own_is_untied(tmp_path):
    untied = random_llama(tiny_config())
    save_llama(untied, tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    assert_same_weights(load_llama(tmp_path, dtype="float32")[0], untied)


def share(directory: pathlib.Path, kept: str, dropped: str, *, metadata: bool) -> None:
    """Store one of two equal tensors, as `safetensors.torch.save_model` does. The other's name is
    in the metadata."""
    tensors = load_file(directory / "model.safetensors")
    tensors.setdefault(kept, tensors[hf_names.EMBED_NAME])
    del tensors[dropped]
    save_file(
        tensors,
        directory / "model.safetensors",
        metadata={"format": "pt"} | ({dropped: kept} if metadata else {}),
    )


@pytest.mark.parametrize("metadata", [True, False])
def test_a_tied_checkpoint_may_store_its_head_alone(metadata, tmp_path):
    llama = random_llama(tiny_config(tie_word_embeddings=True))
    save_llama(llama, tmp_path)
    share(tmp_path, hf_names.HEAD_NAME, hf_names.EMBED_NAME, metadata=metadata)
    assert_same_weights(load_llama(tmp_path, dtype="float32")[0], llama)


@pytest.mark.parametrize(
    ("kept", "dropped"),
    [(hf_names.HEAD_NAME, hf_names.EMBED_NAME), (hf_names.EMBED_NAME, hf_names.HEAD_NAME)],
)
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


def test_generation_config_decides_where_text_ends(saved):
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11]}))
    assert read_config(saved).eos_token_ids == (2, 11)
    (saved / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}))
    assert read_config(saved).eos_token_ids == (2,)


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
    sentencepiece = pytest.importorskip(
        "sentencepiece", reason="the extra sentencepiece is not installed"
    )
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
    assert ids == model.encode(text), (
        "transformers' tokenizer and sentencepiece cut the text differently"
    )


# --- the broken ones


def test_a_sentencepiece_tokenizer_without_its_reader_names_the_extra(saved, monkeypatch):
    (saved / "tokenizer.model").write_bytes(b"a sentencepiece model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'kvq-jax[sentencepiece]'" in refusal(saved)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert "sentencepiece]" not in refusal(saved), "a broken file is another problem"


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"added_tokens": [], "model": {"type": "BPE", "vocab": 5}}', "null"]
)
def test_a_broken_tokenizer_file_is_named(content, saved):
    (saved / "tokenizer.json").write_text(content)
    (saved / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "the tokenizer in " in refusal(saved)


def test_a_missing_directory_is_one_line(tmp_path):
    assert "does not exist" in refusal(tmp_path / "absent")
    assert "does not exist" in refusal("absent")
    assert "does not exist" in refusal("./absent/model")


def test_an_unreachable_hub_is_one_line(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def raising(error):
        def snapshot_download(*args, **kwargs):
            raise error

        return snapshot_download

    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", raising(LocalEntryNotFoundError("no\nnetwork"))
    )
    assert "'some/model' does not exist here" in refusal("some/model")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", raising(OSError("404 Client Error\nfor url"))
    )
    assert "the Hub answered: 404 Client Error" in refusal("some/model")
    assert issubclass(HfHubHTTPError, OSError), "HTTP errors would pass uncaught"


def test_only_safe_files_are_downloaded(saved, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    read_config("some/model")
    assert asked["name"] == "some/model"
    assert set(asked["allow_patterns"]) == {"config.json", "generation_config.json"}
    load_llama("some/model")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not [
        pattern
        for pattern in asked["allow_patterns"]
        if pattern.endswith((".bin", ".py", ".pt", ".pkl", "*"))
    ]


def test_a_file_in_place_of_a_directory_is_refused(saved):
    assert "is not a directory" in refusal(saved / "config.json")


def test_missing_and_malformed_configs_are_named(saved):
    (saved / "config.json").write_text("{")
    assert "config.json' is not valid JSON" in refusal(saved)
    (saved / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "config.json' is not valid JSON: maximum recursion depth" in refusal(saved)
    (saved / "config.json").write_text("[]")
    assert "must hold a JSON object, not a list" in refusal(saved)
    (saved / "config.json").unlink()
    assert "config.json is missing" in refusal(saved)


def test_pickled_weights_are_refused_and_absent_ones_named(saved):
    (saved / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(saved)
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "pickled weights only" in refusal(saved)


@pytest.mark.parametrize(
    "kept", [0, 4, 100, -1], ids=["empty", "in_length", "in_header", "last_byte"]
)
def test_truncated_files_are_named(saved, kept):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    message = refusal(saved)
    assert "model.safetensors' is not a whole safetensors file" in message


def test_a_pointer_in_place_of_a_file_is_named(saved):
    (saved / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    assert "model.safetensors' is not a whole safetensors file" in refusal(saved)


def test_an_index_is_checked(saved):
    whole = (saved / "model.safetensors").rename(saved / "shard.safetensors")
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}}))
    assert "has no weight_map" in refusal(saved)
    index.write_text(
        json.dumps(
            {"weight_map": {"lm_head.weight": whole.name, "model.norm.weight": "gone.safetensors"}}
        )
    )
    assert "lists 'gone.safetensors', which is missing" in refusal(saved)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../shard.safetensors"}}))
    assert "not a file name in the same directory" in refusal(saved)


def test_a_tensor_in_two_files_is_named(saved):
    (saved / "model.safetensors").rename(saved / "a.safetensors")
    save_file({"model.norm.weight": np.ones(64, np.float32)}, saved / "b.safetensors")
    assert (
        refusal(saved)
        == "tensor 'model.norm.weight' is in both 'a.safetensors' and 'b.safetensors'"
    )


def test_missing_and_unmatched_tensors_are_named(saved):
    backup = saved.parent / "backup.safetensors"
    shutil.copy(saved / "model.safetensors", backup)
    change_tensors(saved, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lack tensor 'model.layers.1.mlp.up_proj.weight'" in refusal(saved)
    shutil.copy(backup, saved / "model.safetensors")
    change_tensors(
        saved, lambda t: t.update({"model.layers.0.self_attn.k_proj.bias": np.ones(32, np.float32)})
    )
    assert "hold tensor 'model.layers.0.self_attn.k_proj.bias'" in refusal(saved)


def test_a_tensor_of_wrong_shape_is_named_with_both_shapes(saved):
    change_tensors(
        saved,
        lambda t: t.update(
            {"model.layers.0.self_attn.k_proj.weight": np.ones((64, 32), np.float32)}
        ),
    )
    message = refusal(saved)
    assert (
        message == "tensor 'model.layers.0.self_attn.k_proj.weight' has shape (64, 32), and the"
        " configuration asks for (32, 64)"
    )


@pytest.mark.parametrize(
    ("dtype", "named"), [(np.int32, "I32"), (np.int8, "I8"), (np.bool_, "BOOL")]
)
def test_a_tensor_that_is_not_float_is_named(saved, dtype, named):
    change_tensors(saved, lambda t: t.update({"model.norm.weight": np.ones(64, dtype)}))
    assert f"tensor 'model.norm.weight' is stored as {named}" in refusal(saved)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 1}, "hold tensor 'model.layers.1."),
        ({"num_hidden_layers": 3}, "lack tensor 'model.layers.2."),
        (
            {"vocab_size": 97},
            (
                "'model.embed_tokens.weight' has shape (96, 64), and the configuration asks for"
                " (97, 64)"
            ),
        ),
        (
            {"num_key_value_heads": 4},
            "k_proj.weight' has shape (32, 64), and the configuration asks for (64, 64)",
        ),
        ({"attention_bias": True}, "lack tensor 'model.layers.0.self_attn."),
    ],
)
def test_a_config_that_does_not_fit_its_tensors_is_refused(saved, changes, named):
    change_config(saved, **changes)
    assert named in refusal(saved)


def test_an_unsupported_dtype_is_refused(saved):
    for dtype in ("int8", "float64"):
        with pytest.raises(
            ValueError,
            match=f"dtype='{dtype}' is not supported; supported: float32, bfloat16, float16",
        ):
            load_llama(saved, dtype=dtype)


def test_a_config_that_cannot_be_written_leaves_no_files(tmp_path):
    llama = random_llama(dataclasses.replace(tiny_config(), qk_norm=True))
    with pytest.raises(ValueError, match="cannot express qk_norm=True"):
        save_llama(llama, tmp_path / "new")
    assert not (tmp_path / "new").exists()
