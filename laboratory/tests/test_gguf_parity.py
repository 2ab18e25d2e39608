"""SmolLM2 from its GGUF file against the checkpoint that transformers converts from the same file:
logits and token ids."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_tools.cli
from kvq_models import load_llama
from kvq_models.llama import hf_names
from kvq_models.llama.model import Llama, forward
from kvq_models.named_models.published import SMOLLM2
from tests.kvq_models.checkpoints import row_errors, torch_logits
from tests.kvq_models.gguf_files import swapped

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
pytestmark = pytest.mark.skipif(
    not SMOLLM2.is_here, reason=f"{SMOLLM2.title} is not here: `kvq fetch {SMOLLM2.name}`"
)

TOLERANCE = 1e-4
TOKENS = 64
PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"
# no numbers but 0 to 9: transformers does not read tokenizer.ggml.pre, by which any other number
# stands alone as well
MIXED = """# Prices in 2024, in €

| item | price |
|---|---:|
| café crème | 3.50 |
| smørrebrød | 12,000.00 |

\tdef f(x): return {"a": [x ** 2, -1e-5]}  # it's 100%, isn't it?
They'll say: "naïve" — «да», 日本語のテキスト, مرحبا, 🙂👩‍🔬 …  \r
<|im_start|>user
What is 12345678 + 1?<|im_end|>
   trailing spaces   """


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A directory in Hugging Face's format that transformers alone made from the GGUF file."""
    import gguf
    import safetensors.torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder, file = tmp_path_factory.mktemp("converted"), SMOLLM2.path
    with pytest.MonkeyPatch.context() as patch:
        # seconds for every time that the vocabulary is parsed
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            names = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=names)[
            "tensors"
        ]
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    weights = folder / "model.safetensors"
    safetensors.torch.save_file(contiguous, weights, {"format": "pt"})
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    yield folder
    weights.unlink()  # half a gigabyte, which pytest would keep


@pytest.fixture(scope="module")
def ours() -> tuple[Llama, Any]:
    return load_llama(SMOLLM2.name, dtype="float32")


def test_logits_are_those_of_the_converted_checkpoint(
    converted: pathlib.Path, ours: tuple[Llama, Any]
):
    from transformers import AutoModelForCausalLM

    llama, tokenizer = ours
    tokens = np.asarray([tokenizer(MIXED).input_ids[:TOKENS]])
    wanted = torch_logits(
        AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval(), tokens
    )
    jitted = jax.jit(forward)
    errors = row_errors(jitted(llama, jnp.asarray(tokens)), wanted)
    assert errors.max() < TOLERANCE, f"relative error {errors.max():.2e} at token {errors.argmax()}"
    dense, _ = load_llama(SMOLLM2.name, dtype="float32", weights="dense")
    control = row_errors(jitted(_with_rows_of_the_file(dense), jnp.asarray(tokens)), wanted)
    assert control.max() > 100 * TOLERANCE, (
        "the comparison does not see one projection's rows in the file's order"
    )


def test_token_ids_are_those_of_the_converted_checkpoint(
    converted: pathlib.Path, ours: tuple[Llama, Any]
):
    from transformers import AutoTokenizer

    own, theirs = ours[1], AutoTokenizer.from_pretrained(converted)
    text = f"{MIXED}\n{PASSAGE.read_text(encoding='utf-8')}"
    ids = own(text).input_ids
    assert ids == theirs(text).input_ids
    assert own.decode(ids) == text
    assert own(text.replace("naïve", "naive")).input_ids != ids


def _with_rows_of_the_file(llama: Llama) -> Llama:
    """Return the model as a loader would leave it that takes the last layer's queries in GGUF's
    order of rows."""
    path = f"layers.{llama.config.num_hidden_layers - 1}.q_proj.kernel"
    kernel = np.asarray(hf_names.weights(llama)[path].leaf)
    return hf_names.replace_weights(
        llama, {path: jnp.asarray(swapped(kernel.T, llama.config.num_attention_heads).T)}
    )
