"""A tiny model, its cache and its text, on one device or on a mesh."""

import functools

import numpy as np

import kvq_jax as kvq
from kvq_jax.placement.allowed import parse
from kvq_models import generate
from kvq_models.llama.model import Llama
from kvq_models.llama.sharding import shard_llama
from tests.kvq_models.checkpoints import random_llama, tiny_config

SPEC = "innerq:sink=4,recent=8,block=16"


CAPACITY = 128


CONFIG = tiny_config(
    vocab_size=96, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=16
)


TOKENS = np.random.default_rng(0).integers(3, 90, (2, 50))


@functools.cache
def model(mesh: str = "") -> Llama:
    plain = random_llama(CONFIG)
    return shard_llama(plain, parse(mesh)) if mesh else plain


def cache_of(mesh: str = "", spec: str = SPEC, batch: int = 2) -> kvq.cache.Cache:
    return kvq.init_cache(
        spec, CONFIG, batch, CAPACITY, "float32", placement=parse(mesh) if mesh else None
    )


@functools.cache
def text_of_one_device() -> np.ndarray:
    return np.asarray(generate(model(), cache_of(), TOKENS, max_new_tokens=20).tokens)
