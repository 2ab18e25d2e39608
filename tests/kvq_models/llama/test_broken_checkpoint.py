"""Every way in which a checkpoint can be broken: one line that names the file or the tensor."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvq_models.llama.checkpoint import load_llama, save_llama
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal


def test_a_sentencepiece_tokenizer_without_its_reader_names_the_extra(saved, monkeypatch):
    import transformers  # noqa: F401  its import looks for packages, too

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


def test_missing_and_malformed_configs_are_named(saved):
    for content, told in (
        ("{", "config.json' is not valid JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "JSON: maximum recursion depth"),
        ("[]", "must hold a JSON object, not a list"),
    ):
        (saved / "config.json").write_text(content)
        assert told in refusal(saved)
    (saved / "config.json").unlink()
    assert "config.json is missing" in refusal(saved)


def test_an_adapter_beside_the_configuration_of_its_model_is_named(saved):
    (saved / "adapter_config.json").write_text("{}")
    assert load_llama(saved), "the model is here, too"
    (saved / "model.safetensors").rename(saved / "adapter_model.safetensors")
    assert "is a LoRA adapter without its model: merge it" in refusal(saved)


def test_a_directory_of_another_kind_is_named(saved):
    (saved / "config.json").unlink()
    (saved / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter without its model: merge it" in refusal(saved)
    (saved / "model.gguf").write_bytes(b"GGUF")
    assert "give the path of the file, such as" in refusal(saved)


def test_a_single_number_has_no_parts(saved):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    change_config(saved, model_type="phi3", architectures=["Phi3ForCausalLM"])
    change_tensors(saved, lambda tensors: tensors.update({name: np.zeros((), np.float32)}))
    assert f"tensor '{name}' is a single number" in refusal(saved)


def test_pickled_weights_are_refused_and_absent_ones_named(saved):
    (saved / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(saved)
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "pickled weights only" in refusal(saved)


@pytest.mark.parametrize("kept", [0, -1], ids=["empty", "last_byte"])
def test_truncated_files_are_named(saved, kept):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    message = refusal(saved)
    assert "model.safetensors' is not a whole safetensors file" in message


def test_an_index_is_checked(saved):
    whole = (saved / "model.safetensors").rename(saved / "shard.safetensors")
    gone = {"lm_head.weight": whole.name, "model.norm.weight": "gone.safetensors"}
    outside = {"lm_head.weight": "../shard.safetensors"}
    for content, told in (
        ({"metadata": {}}, "has no weight_map"),
        ({"weight_map": gone}, "lists 'gone.safetensors', which is missing"),
        ({"weight_map": outside}, "not a file name in the same directory"),
    ):
        (saved / "model.safetensors.index.json").write_text(json.dumps(content))
        assert told in refusal(saved)


def test_a_tensor_in_two_files_is_named(saved):
    (saved / "model.safetensors").rename(saved / "a.safetensors")
    save_file({"model.norm.weight": np.ones(64, np.float32)}, saved / "b.safetensors")
    told = "tensor 'model.norm.weight' is in both 'a.safetensors' and 'b.safetensors'"
    assert refusal(saved) == told


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


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(saved, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    (saved / name).write_text(pointer)
    path = saved if name == "model.safetensors" else saved / name
    assert "it is a pointer of Git LFS; `git lfs pull` fetches the file" in refusal(path)


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
            "embed_tokens.weight' has shape (96, 64), and the configuration asks for (97, 64)",
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


@pytest.mark.parametrize("size", ["num_attention_heads", "head_dim"])
def test_a_size_that_no_tensor_has_is_refused_before_anything_grows_with_it(size, tmp_path):
    save_llama(random_llama(tiny_config("phi3", partial_rotary_factor=0.75)), tmp_path)
    change_config(tmp_path, **{size: 2**40, "num_key_value_heads": 4, "partial_rotary_factor": 0.5})
    assert "has shape" in refusal(tmp_path)


def test_an_unsupported_dtype_is_refused(saved):
    supported = "is not supported; supported: float32, bfloat16, float16"
    for dtype in ("int8", "float64", "x16"):
        with pytest.raises(ValueError, match=f"dtype='{dtype}' {supported}"):
            load_llama(saved, dtype=dtype)
