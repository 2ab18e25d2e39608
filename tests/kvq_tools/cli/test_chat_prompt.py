"""The ids of a chat prompt: a template writes special tokens itself."""

from kvq_models.llama.gguf_tokenizer import core_of, tokenizer_of
from kvq_tools.cli import text_input
from tests.kvq_models.gguf_files import byte_level


def test_a_template_that_writes_the_first_token_gives_one_of_it():
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    fields = {f"tokenizer.ggml.{name}": value for name, value in byte_level().items()}
    fields |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": template}
    tokenizer = tokenizer_of(fields, core_of(fields))
    bos = tokenizer.bos_token_id
    assert text_input.encode(tokenizer, "THE", chat=True).count(bos) == 1
    assert text_input.encode(tokenizer, "THE").count(bos) == 1
    assert tokenizer(f"{tokenizer.bos_token}THE").input_ids.count(bos) == 2, "the control"
