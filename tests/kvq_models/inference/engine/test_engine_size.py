"""Slots and capacity from a number of bytes: exactly the bytes that an engine allocates, and as
many slots as fit."""

import jax
import pytest

from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.engine_size import engine_size
from kvq_models.inference.engine.limits import MAX_SLOTS
from tests.kvq_models.checkpoints import random_llama, tiny_config

CONFIG = tiny_config(max_position_embeddings=640)
# statistics beside the tokens, and two methods
SPECS = ("innerq:bits=2", "k=kivi:bits=4+v=int4+cache:sink=3,recent=9,block=32")


@pytest.mark.parametrize("spec", SPECS)
def test_as_many_slots_as_fit(spec: str):
    five = engine_size(spec, CONFIG, slots=5, dtype="float32")
    found = engine_size(spec, CONFIG, memory=five.nbytes, dtype="float32")
    assert found == five
    assert found.capacity == 640
    assert engine_size(spec, CONFIG, memory=five.nbytes - 1, dtype="float32").slots == 4
    assert engine_size(spec, CONFIG, memory=1 << 40).slots == MAX_SLOTS


@pytest.mark.parametrize("spec", SPECS)
def test_as_many_tokens_as_fit(spec: str):
    size = engine_size(spec, CONFIG, slots=3, capacity=320)
    assert engine_size(spec, CONFIG, slots=3, memory=size.nbytes) == size
    assert engine_size(spec, CONFIG, slots=3, memory=size.nbytes - 1).capacity == 256
    less = engine_size(spec, CONFIG, slots=1, capacity=320)
    assert engine_size(spec, CONFIG, memory=less.nbytes) == less, (
        "one slot of the full length does not fit, so the length gives way"
    )


def test_the_bytes_are_those_of_all_arrays_that_an_engine_allocates():
    llama = random_llama(tiny_config(num_hidden_layers=1))
    for spec in ("kivi:bits=4", "innerq:bits=2"):
        before = jax.live_arrays()  # kept, so that no new array has the id of an old one
        engine = Engine(llama, spec, slots=3, capacity=192, dtype="bfloat16")
        old = set(map(id, before))
        allocated = sum(array.nbytes for array in jax.live_arrays() if id(array) not in old)
        size = engine_size(spec, llama.config, slots=3, capacity=192, dtype="bfloat16")
        assert (engine.nbytes, allocated) == (size.cache_bytes, size.nbytes)


def test_what_does_not_fit_is_refused():
    size = engine_size("kivi:bits=2", CONFIG, slots=4, capacity=512).nbytes
    with pytest.raises(
        ValueError,
        match=rf"\A4 slots of 512 tokens, [^\n]* take {size} bytes with 'kivi:bits=2', and the"
        rf" memory has {size - 1} bytes: up to 448 tokens fit\Z",
    ):
        engine_size("kivi:bits=2", CONFIG, slots=4, capacity=512, memory=size - 1)
    with pytest.raises(ValueError, match="give more, or a smaller cache"):
        engine_size("kivi:bits=2", CONFIG, memory=1000)
