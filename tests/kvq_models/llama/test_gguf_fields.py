"""No field of a GGUF file that changes the computation, the tokens, or where a text ends is
ignored; files in parts, of other byte orders and of other kinds are read or named."""

import dataclasses
import pathlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
import pytest

from kvq_models.llama import gguf_fields, gguf_header, gguf_metadata
from kvq_models.llama.checkpoint import load_llama, open_checkpoint, read_config, save_llama
from kvq_models.llama.gguf_families import MODEL_TYPES
from kvq_models.llama.gguf_header import GgufHeader
from kvq_models.llama.gguf_tokenizer import ALIASES
from kvq_models.llama.model import Llama
from kvq_models.llama.rope_config import RopeConfig
from kvq_models.llama.stored_tensor import CheckpointError
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import TOKENS, byte_level, split_gguf, write_gguf

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
OF_YARN = RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)


@pytest.fixture(scope="module")
def llama() -> Llama:
    return random_llama(tiny_config(tie_word_embeddings=True))


@pytest.fixture
def write(llama: Llama, tmp_path: pathlib.Path):
    def written(**options: Any) -> pathlib.Path:
        return write_gguf(llama, tmp_path / "m.gguf", **options)

    return written


def refused(read: Any) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_every_field_of_the_architecture_is_read_harmless_or_refused(architecture: str):
    """The names are those that the gguf library knows for language models."""
    names = {
        value.removeprefix("{arch}.")
        for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith("{arch}.")
    }
    accepted = gguf_fields.READ | gguf_fields.HARMLESS
    accepted |= gguf_fields.READ_BY.get(architecture, frozenset())
    accepted |= gguf_fields.HARMLESS_BY.get(architecture, frozenset())
    accepted -= gguf_fields.NEUTRAL_BY.get(architecture, {}).keys()
    for name in sorted(names):
        field = f"{architecture}.{name}"
        if name in accepted:
            gguf_fields.check_all_known({field: 0.37}, architecture, 16)
            continue
        with pytest.raises(NotImplementedError, match=re.escape(f"{field}=0.37")):
            gguf_fields.check_all_known({field: 0.37}, architecture, 16)
    assert {"rope.scaling.factor", "attention.key_length"} <= accepted


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope.scaling.factor": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
        ({"rope.scale_linear": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
        (
            {"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0},
            RopeConfig(rope_type="linear", factor=2.0),
        ),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeConfig()),
        ({"rope.scaling.type": "linear"}, RopeConfig()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, RopeConfig()),
        (YARN, OF_YARN),
        (
            YARN | {"rope.scaling.attn_factor": 0.5},
            dataclasses.replace(OF_YARN, attention_factor=0.5 * (1 + 0.1 * np.log(4.0))),
        ),
    ],
)
def test_rope_is_scaled_as_llama_cpp_reads_it(fields: dict, rope: RopeConfig, write):
    assert read_config(write(fields=fields)).rope == rope


@pytest.mark.parametrize("name", [alias for names in ALIASES.values() for alias in names])
def test_other_names_of_a_split_cut_text_in_the_same_way(name: str, write):
    plain = next(plain for plain, names in ALIASES.items() if name in names)
    ids = [
        open_checkpoint(write(tokenizer=byte_level(pre=pre))).tokenizer()(" THE 12 they'll 1234")
        for pre in (name, plain)
    ]
    assert ids[0].input_ids == ids[1].input_ids


def test_a_split_that_the_file_does_not_name_is_not_guessed(write):
    tokenizer = byte_level()
    del tokenizer["pre"]
    message = refused(open_checkpoint(write(tokenizer=tokenizer)).tokenizer)
    assert "tokenizer.ggml.pre is missing" in message
    assert "supported: gpt-2, smollm, llama-bpe, qwen2" in message


def test_a_field_that_may_change_tokens_is_refused_by_name(write):
    path = write(tokenizer=byte_level(remove_extra_whitespaces=True))
    told = refused(open_checkpoint(path).tokenizer)
    assert "tokenizer.ggml.remove_extra_whitespaces=True" in told
    assert open_checkpoint(write(tokenizer=byte_level(remove_extra_whitespaces=False))).tokenizer()


def test_generation_ends_at_every_token_that_ends_a_text_or_a_turn(write):
    """A Llama 3 file with the end of a text as its end of sequence ends its turns with
    <|eot_id|>."""
    tokens = [*TOKENS, "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "<|python_tag|>"]
    kinds = [3, *[1] * (len(TOKENS) - 1), 3, 3, 1, 3]
    at = len(TOKENS)
    fields = {"tokens": tokens, "token_type": kinds, "eos_token_id": at + 1, "eom_token_id": 7}
    config = read_config(write(tokenizer=byte_level(**fields)))
    assert config.eos_token_ids == (at + 1, 7, 0, at), "also <|end|>; no ordinary token"
    no_kinds = byte_level(eos_token_id=0, eot_token_id=5)
    del no_kinds["token_type"]
    assert read_config(write(tokenizer=no_kinds)).eos_token_ids == (0, 5)


def test_an_id_that_the_model_never_generates_ends_nothing(write):
    fields = {"eos_token_id": 2**31, "eot_token_id": 96, "eom_token_id": 95}
    assert read_config(write(tokenizer=fields)).eos_token_ids == (95,)


def test_the_end_of_a_message_ends_no_answer_of_gpt_oss(write):
    """Its analysis ends with <|end|>, and its final message with <|return|>."""
    tokens = [*TOKENS, "<|return|>", "<|call|>"]
    kinds, at = [3, *[1] * (len(TOKENS) - 1), 3, 3], len(TOKENS)
    assert tokens.index("<|end|>") == 0
    fields = byte_level(tokens=tokens, token_type=kinds, eos_token_id=at)
    assert read_config(write(tokenizer=fields)).eos_token_ids == (at, at + 1)


def test_sampling_that_the_file_asks_for_is_kept_as_data(llama: Llama, tmp_path: pathlib.Path):
    asked = {"sampling.temp": 0.6, "sampling.top_k": 20}
    path = write_gguf(llama, tmp_path / "m.gguf", general=asked)
    loaded, _ = load_llama(path, dtype="float32")
    generation = loaded.config.generation
    save_llama(loaded, tmp_path / "saved")
    assert read_config(tmp_path / "saved").generation == generation
    assert (round(generation.temperature, 3), generation.top_k, generation.top_p) == (0.6, 20, 1.0)
    assert read_config(write_gguf(llama, path)).generation.temperature == 0


def test_a_split_file_is_read_whole_from_any_part(tmp_path: pathlib.Path):
    """The head lies in one part alone, so a part by itself would look tied."""
    path = write_gguf(random_llama(tiny_config()), tmp_path / "m.gguf", tokenizer=byte_level())
    parts, whole = split_gguf(path, 3), open_checkpoint(path)
    for part in parts:
        files = open_checkpoint(part)
        assert files.config == whole.config
        assert not files.config.tie_word_embeddings
        assert files.tensors.keys() == whole.tensors.keys()
        assert all(np.array_equal(files.read(name), whole.read(name)) for name in whole.tensors)
        assert files.tokenizer()(" the 12").input_ids == whole.tokenizer()(" the 12").input_ids
    parts[1].rename(tmp_path / "other.gguf")
    message = refused(lambda: open_checkpoint(parts[0]))
    assert "3 parts" in message
    assert parts[1].name in message
    message = refused(lambda: open_checkpoint(tmp_path / "other.gguf"))
    assert "parts are named NAME-00001-of-00003.gguf" in message
    parts[0].rename(parts[1])
    parts[2].rename(parts[0])
    (tmp_path / "other.gguf").rename(parts[2])
    assert "split.no=" in refused(lambda: open_checkpoint(parts[0]))


def test_a_file_of_another_byte_order_is_named(llama: Llama, tmp_path: pathlib.Path):
    path = write_gguf(llama, tmp_path / "m.gguf", endianess=gguf.GGUFEndian.BIG)
    assert "is a big-endian GGUF file" in refused(lambda: read_config(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1; supported: 2, 3"),
        (lambda data: data.replace(b".bos_token_id", b".eos_token_id"), "eos_token_id' twice"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "cut off or damaged"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "of [0-9]+ dimensions"),
    ],
)
def test_a_damaged_header_ends_in_one_line(change: Any, message: str, write):
    path = write()
    path.write_bytes(change(path.read_bytes()))
    assert re.search(message, refused(lambda: load_llama(path)))


def test_a_file_that_is_cut_off_in_its_tensors_is_not_opened(write):
    """Such as an interrupted download."""
    path = write()
    path.write_bytes(path.read_bytes()[:-4])
    assert "is cut off: tensor 'output_norm.weight' ends at byte" in refused(
        lambda: open_checkpoint(path)
    )


def test_a_file_is_measured_with_the_block_sizes_of_the_library():
    library = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert gguf_header.BLOCK_SIZES.items() >= library.items()


def test_a_tensor_without_axes_is_named(tmp_path: pathlib.Path):
    writer = gguf.GGUFWriter(path := tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'token_embd.weight' of 0 dimensions" in refused(lambda: read_config(path))


@pytest.mark.parametrize("alignment", [16, 64])
def test_tensors_lie_where_the_file_says(alignment: int, llama: Llama, tmp_path: pathlib.Path):
    plain = open_checkpoint(write_gguf(llama, tmp_path / "m.gguf"))
    path = write_gguf(llama, tmp_path / "a.gguf", alignment=alignment)
    aligned = open_checkpoint(path)
    for name in plain.tensors:
        assert np.array_equal(plain.read(name), aligned.read(name)), name
    stated = b"general.alignment" + struct.pack("<II", 4, alignment)
    sound = path.read_bytes()
    for kind, value, told in (
        ("<II", (4, 0), "0"),
        ("<II", (4, 48), "48"),
        ("<I?", (7, True), "True"),
        ("<IQ", (10, 2**63), "9223372036854775808"),
    ):
        path.write_bytes(sound.replace(stated, b"general.alignment" + struct.pack(kind, *value)))
        refusal = refused(lambda: open_checkpoint(path))
        assert f"general.alignment={told}, which must be a power of two" in refusal


def test_a_lora_adapter_is_named(llama: Llama, tmp_path: pathlib.Path):
    path = write_gguf(llama, tmp_path / "m.gguf", general={"type": "adapter"})
    assert "general.type='adapter'; supported: model" in refused(lambda: open_checkpoint(path))


def test_fields_are_those_that_the_library_reads(write):
    path = write(
        tokenizer=byte_level(chat_template="{{ messages }}"), fields={"rope.freq_base": 5e5}
    )
    reader = gguf.GGUFReader(path)
    fields = GgufHeader(path).fields
    wanted = {name: field.contents() for name, field in reader.fields.items()}
    assert dict(fields) == {name: value for name, value in wanted.items() if "GGUF." not in name}
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GgufHeader(pathlib.Path(__file__))


def test_a_file_is_opened_once_until_it_changes(llama: Llama, tmp_path: pathlib.Path):
    """Two tokenizers of one file are still two: a caller may change one."""
    path = write_gguf(llama, tmp_path / "m.gguf", tokenizer=byte_level())
    files = open_checkpoint(path)
    assert open_checkpoint(path) is files
    first, second = files.tokenizer(), files.tokenizer()
    first.add_tokens(["THE"])
    assert len(first("THE").input_ids) == 1
    assert len(second("THE").input_ids) == 3
    write_gguf(llama, path, tokenizer=byte_level(pre="qwen2"))
    assert open_checkpoint(path) is not files


def test_another_architecture_is_refused_without_a_look_at_the_vocabulary(
    llama: Llama, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_gguf(llama, tmp_path / "m.gguf", architecture="gemma", tokenizer=byte_level())
    decoded = []
    value = GgufHeader.value

    def counted(header: GgufHeader, kind: int, at: int) -> Any:
        decoded.append(kind)
        return value(header, kind, at)

    monkeypatch.setattr(gguf_header.GgufHeader, "value", counted)
    assert "GGUF architecture 'gemma' is not supported" in refused(lambda: read_config(path))
    assert gguf_header._ARRAY not in decoded
    assert decoded, "the control: texts are decoded by this function"


def test_a_configuration_decodes_the_texts_of_control_tokens_alone(
    llama: Llama, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_gguf(llama, tmp_path / "m.gguf", tokenizer=byte_level())
    decoded, texts = [], GgufHeader._texts

    def counted(header: GgufHeader, at: int, places: Sequence[int]) -> list[str]:
        decoded.append(texts(header, at, places))
        return decoded[-1]

    monkeypatch.setattr(GgufHeader, "_texts", counted)
    config, fields = read_config(path), GgufHeader(path).fields
    vocabulary = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    control = [i for i, kind in enumerate(kinds) if kind == gguf_metadata.CONTROL]
    assert decoded[0] == [vocabulary[i] for i in control]
    assert 0 < len(control) < len(vocabulary) / 2, "the control: most tokens are ordinary"
    assert set(config.eos_token_ids) <= set(control)
    assert fields.texts("tokenizer.ggml.tokens", [1, 3, 10**9]) == [vocabulary[1], vocabulary[3]]
    assert fields.texts("tokenizer.ggml.token_type", [0]) == fields.texts("no.field", [0]) == []
