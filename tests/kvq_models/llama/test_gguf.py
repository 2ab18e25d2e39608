"""GGUF files load like the checkpoints they were made from: weights, configuration, tokens.
Unsupported features are refused by name."""

import dataclasses
import pathlib

import gguf
import numpy as np
import pytest

from kvq_models.llama.checkpoint import CheckpointError, load_llama, open_checkpoint, read_config
from kvq_models.llama.gguf_fields import token
from kvq_models.llama.gguf_tokenizer import core_of, tokenizer_of
from kvq_models.llama.hf_directory import load_tokenizer
from kvq_models.llama.rope import rope_for
from kvq_models.llama.rope_config import RopeConfig
from tests.kvq_models.checkpoints import LLAMA3, STORIES, random_llama, tiny_config
from tests.kvq_models.gguf_files import byte_level, write_gguf


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_gguf(
        random_llama(tiny_config()),
        tmp_path_factory.mktemp("gguf") / "plain.gguf",
        tokenizer=byte_level(),
    )


def refusal(path: pathlib.Path) -> str:
    with pytest.raises((CheckpointError, ValueError, NotImplementedError)) as caught:
        load_llama(path, dtype="float32")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "error"), [("BF16", 8e-3), ("Q8_0", 1e-2), ("Q4_1", 0.1)])
def test_matrices_are_the_numbers_that_their_blocks_stand_for(
    kind: str, error: float, tmp_path: pathlib.Path
):
    source = random_llama(tiny_config())
    files = open_checkpoint(write_gguf(source, tmp_path / "m.gguf", kind=kind))
    assert files.tensors["model.layers.1.mlp.up_proj.weight"].dtype == kind
    wanted = np.asarray(source.layers[1].mlp.up_proj.kernel[...]).T
    found, of_kind = (
        files.read("model.layers.1.mlp.up_proj.weight"),
        gguf.GGMLQuantizationType[kind],
    )
    assert np.array_equal(found, gguf.dequantize(gguf.quantize(wanted, of_kind), of_kind))
    assert error / 10 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < error


def test_llama3s_frequencies_come_from_their_quotients(tmp_path: pathlib.Path):
    rope = RopeConfig(**LLAMA3 | {"theta": 5e5, "original_max_position_embeddings": 8192})
    config = dataclasses.replace(tiny_config(head_dim=32), rope=rope)
    plain = dataclasses.replace(config, rope=RopeConfig(theta=5e5))
    unscaled, scaled = (rope_for(c, 1).inverse_frequencies for c in (plain, config))
    quotients, source = np.asarray(unscaled / scaled), random_llama(config)
    assert read_config(write_gguf(source, tmp_path / "m.gguf", rope_factors=quotients)).rope == rope
    bent = quotients * np.linspace(1, 1.1, quotients.size)
    path = write_gguf(source, tmp_path / "bent.gguf", rope_factors=bent)
    assert "rope_freqs.weight" in refusal(path)


@pytest.mark.parametrize("window", [16, 0])
def test_a_sliding_window_is_of_all_layers(window: int, tmp_path: pathlib.Path):
    fields = {"attention.sliding_window": window}
    file = write_gguf(random_llama(tiny_config()), tmp_path / "m.gguf", fields=fields)
    config = read_config(file)
    assert (config.positions, config.sliding_window) == (64, window or None)
    assert config.windowed_layers == ((0, 1) if window else ())


def test_an_unknown_type_of_tensors_is_refused_by_name(plain: pathlib.Path, tmp_path: pathlib.Path):
    whole = plain.read_bytes()
    # dimensions, one length, then the type
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path = tmp_path / "odd.gguf"
    path.write_bytes(whole[:at] + (199).to_bytes(4, "little") + whole[at + 4 :])
    assert "199" in refusal(path)


def test_another_file_is_no_checkpoint(tmp_path: pathlib.Path):
    (tmp_path / "model.txt").write_text("text")
    assert "nor a .gguf file" in refusal(tmp_path / "model.txt")


@pytest.mark.parametrize(
    ("pre", "ids"),
    [
        ("gpt-2", ["Ġthe", "Ġ", "12"]),
        ("smollm", ["Ġthe", "Ġ", "1", "2"]),
        ("qwen2", ["Ġthe", "Ġ", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, ids: list[str], tmp_path: pathlib.Path):
    written = byte_level(pre=pre, chat_template="{{ messages[0]['content'] }}")
    path = write_gguf(random_llama(tiny_config()), tmp_path / "m.gguf", tokenizer=written)
    tokenizer = open_checkpoint(path).tokenizer()
    assert tokenizer.tokenize(" the 12") == ids
    assert tokenizer.decode(tokenizer(" THE <|end|>").input_ids) == " THE <|end|>"
    assert tokenizer("<|end|>").input_ids == [0]
    assert tokenizer.eos_token == "<|end|>"
    chat = [{"role": "user", "content": "HI"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "HI"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "martian"}, "tokenizer.ggml.pre='martian' is not supported; supported: gpt-2"),
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"eos_token_id": 4000}, "eos_token_id=4000 is not the number of one of the 72 tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "holds 'a' twice"),
        ({"merges": ["ab"]}, "merges holds an entry that is not a pair of tokens"),
        ({"merges": ["a c"]}, "Token `a` out of vocabulary"),
        ({"merges": "a c"}, "tokenizer.ggml.merges is missing or not a list of texts"),
        ({"token_type": 3}, "tokenizer.ggml.token_type='3' must be a list"),
        ({"pre": ["gpt-2"]}, "tokenizer.ggml.pre=\"['gpt-2']\" is of the wrong type"),
        ({"model": ["gpt2"]}, "tokenizer.ggml.model=\"['gpt2']\" is not supported"),
        (
            {"model": "llama", "tokens": ["a"], "token_type": [1], "scores": [0.0]},
            "tokenizer.ggml.tokens lacks '<unk>'",
        ),
        (
            {"model": "llama", "tokens": ["a" * 9000], "token_type": [1], "scores": [0.0]}
            | {"bos_token_id": 0},
            "holds a piece of 9000 characters; at most 1024 are read",
        ),
    ],
)
def test_a_tokenizer_that_would_give_other_tokens_is_refused(
    fields: dict, message: str, tmp_path: pathlib.Path
):
    assert message in refusal(
        write_gguf(random_llama(tiny_config()), tmp_path / "m.gguf", tokenizer=byte_level(**fields))
    )


@pytest.mark.parametrize(("architecture", "between"), [("phi3", []), ("llama", ["▁", "<0x0A>"])])
def test_special_tokens_of_phi_3_swallow_the_spaces_behind_them(
    architecture: str, between: list[str], tmp_path: pathlib.Path
):
    """Its template writes a line break behind each, which its tokenizer.json leaves out."""
    tokens = ["<unk>", "<s>", "▁", "H", "<0x0A>", "<|user|>", "<|end|>"]
    fields = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 1, 1, 6, 3, 3]}
    fields |= {"scores": [0.0] * 7, "add_bos_token": False, "unknown_token_id": 0}
    llama = random_llama(tiny_config(architecture))
    path = write_gguf(llama, tmp_path / "m.gguf", architecture=architecture, tokenizer=fields)
    ids = open_checkpoint(path).tokenizer()("<|user|>\nH<|end|>\n<s> ").input_ids
    wanted = ["<|user|>", *(between or ["▁"]), "H", "<|end|>", *between, "<s>", "▁", "▁"]
    assert [tokens[i] for i in ids] == wanted


def test_a_sentencepiece_file_that_names_no_first_and_last_token_has_llama_cpps():
    tokens = ["<unk>", "<s>", "</s>", "▁", "H"]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, 1, 1],
        "scores": [0.0] * 5,
    }
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    tokenizer = tokenizer_of(fields, core_of(fields))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer("H").input_ids == [1, 3, 4], "llama.cpp begins such texts with <s>"
    assert [token(fields, name) for name in ("bos", "eos", "eot")] == [1, 2, None]
    byte_level = fields | {"tokenizer.ggml.model": "gpt2"}
    assert token(byte_level, "bos") is None


@pytest.mark.skipif(not STORIES.exists(), reason="the small public Llama is not beside the project")
def test_sentence_pieces_merge_as_in_the_source(tmp_path: pathlib.Path):
    source = load_tokenizer(STORIES)
    vocabulary = sorted(source.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in vocabulary]
    kinds = [2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1 for i in range(len(tokens))]
    # Llama's pieces stand in the order of their scores
    scores = [-float(max(i - 259, 0)) for i in range(len(tokens))]
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    fields |= {"add_bos_token": True, "unknown_token_id": 0}
    path = write_gguf(random_llama(tiny_config()), tmp_path / "m.gguf", tokenizer=fields)
    own = open_checkpoint(path).tokenizer()
    for text in (
        "Once upon a time, there was a little girl named Lily.",
        "tabs\tand\n\nlines  of é 日本 🙂",
        " leading and trailing ",
    ):
        ids = source(text).input_ids
        assert own(text).input_ids == ids, text
        assert len({one.decode(ids, skip_special_tokens=True) for one in (own, source)}) == 1
