"""Prompts from the store equal reading them bit for bit. The store keeps to its budget and drops
the least recently used pieces first."""

import dataclasses

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import Llama, prepare
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.pieces import RowPiece, RowPieces
from kvq_models.inference.engine.prefixes import PrefixStore, chunk_keys, scope_of
from kvq_models.inference.engine.requests import Ended, Request
from kvq_models.inference.prompts import read_prompt
from kvq_models.inference.sampling import Sampling
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.inference.engine.test_engine import without_ticket
from tests.methods_table import METHOD_CASES

SPEC = "innerq:bits=2,recent=8,block=32"  # takes a key norm from the prompt
CHUNK, CAPACITY, VOCABULARY = 48, 128, 96
CASES = [
    case for case in METHOD_CASES if case.id in ("kivi4_group8", "innerq2", "squat2", "xquant_cl2")
]


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist())


def engine_of(llama: Llama, store: PrefixStore | None = None, slots: int = 2, **options) -> Engine:
    return Engine(
        llama, SPEC, slots=slots, capacity=CAPACITY, widths=(16, CHUNK), prefixes=store, **options
    )


def answers(engine: Engine, requests: list[Request]) -> list[list[tuple]]:
    """Return the tokens of each request. All are submitted at the start."""
    got: dict[int, list[tuple]] = {engine.submit(request): [] for request in requests}
    while not engine.idle:
        for event in engine.advance():
            got[event.ticket].append(without_ticket(event))
    return list(got.values())


def some_requests() -> list[Request]:
    """A shared first chunk, shared two, whole prompts that come again, prompts that end at a chunk,
    choices, and one that is alone."""
    base, sampling = tokens_of(0, 2 * CHUNK), Sampling(0.9)
    prompts = [
        base[:CHUNK] + tokens_of(1, 20),
        base + tokens_of(2, 9),
        base + tokens_of(3, 20),
        base[:CHUNK],
        base,
        base[:CHUNK] + tokens_of(1, 20),
        base[: CHUNK - 1] + tokens_of(4, 30),  # differs in the last token of the first chunk
        base[:40],  # the first chunk begins like this, and that helps nobody
        tokens_of(5, 30),
        tokens_of(5, 30),
    ]
    return [
        Request(prompt, 9, sampling if i % 2 else Sampling(), seed=i // 3, choice=i % 3)
        for i, prompt in enumerate(prompts)
    ]


def test_requests_get_the_same_bits_with_and_without_the_store(llama: Llama, compiled: list[str]):
    requests = some_requests()
    plain = engine_of(llama)
    expected = answers(plain, requests)
    store = PrefixStore(1 << 20)
    engine = engine_of(llama, store)
    engine.warm_up()
    assert (len(store), engine.counts.prefix_lookups) == (0, 0), "warming up leaves prompts behind"
    programs_before = len(compiled)
    assert answers(engine, requests) == expected
    counts = engine.counts
    first = (0, CHUNK, 2 * CHUNK, CHUNK, 2 * CHUNK, CHUNK + 20, 0, 0, 0, 30)
    assert (counts.prefix_lookups, counts.prefix_hits, counts.prefix_tokens) == (
        10,
        sum(n > 0 for n in first),
        sum(first),
    )
    assert counts.prompt_tokens + counts.prefix_tokens == plain.counts.prompt_tokens
    read = counts.chunks
    assert answers(engine, requests) == expected
    assert counts.chunks == read, "a prompt was read again"
    assert len(compiled) == programs_before, "the store compiles"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_row_from_pieces_has_the_bits_of_the_one_that_was_read(case):
    llama = prepare(random_llama(tiny_config(num_hidden_layers=2)), case.spec)
    row = kvq.init_cache(case.spec, llama.config, 1, CAPACITY)
    parts, pieces, read, prompt = RowPieces(row, VOCABULARY), [], 0, tokens_of(6, 2 * CHUNK + 16)
    while read < len(prompt):
        own = prompt[read : read + CHUNK]
        tokens = np.zeros((1, CHUNK), np.int32)
        tokens[0, : len(own)] = own
        logits, row = read_prompt(llama, row, tokens, np.array([len(own)], np.int32))
        pieces.append(parts.cut(row, read, read + len(own), logits))
        read += len(own)
    expected = bits(row)
    assert bits(parts.joined(pieces)) == expected
    assert bits(parts.joined(pieces[:2] + pieces[1:2])) != expected, (
        "a row without its last chunk is the same"
    )
    assert bits(parts.joined([pieces[1], pieces[1], pieces[2]])) != expected, (
        "what the first chunk left is not there"
    )


def bits(row: kvq.cache.Cache) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(row)
    }


def test_pieces_of_another_prompt_would_be_noticed(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    requests = [Request(tokens_of(seed, 60), 12) for seed in (7, 8)]
    expected = answers(engine_of(llama), requests)
    monkeypatch.setattr(
        "kvq_models.inference.engine.prefix_rows.chunk_keys",
        lambda scope, prompt, chunk, owner: chunk_keys(scope, [0] * len(prompt), chunk, owner),
    )
    assert answers(engine_of(llama, PrefixStore(1 << 20)), requests)[1] != expected[1]


def test_prompts_whose_log_probabilities_are_asked_for_are_read(llama: Llama):
    engine = engine_of(llama, PrefixStore(1 << 20))
    asked = Request(tokens_of(11, 60), 2, prompt_logprobs=True)
    first, second = answers(engine, [asked]), answers(engine, [asked])
    assert first == second
    assert len(first[0][0][1]) == 60
    assert (engine.counts.chunks, engine.counts.prefix_lookups) == (4, 0)


def test_a_prompt_that_is_let_go_half_way_leaves_whole_chunks(llama: Llama):
    engine, prompt = engine_of(llama, PrefixStore(1 << 20)), tokens_of(12, 100)
    ticket = engine.submit(Request(prompt, 5))
    engine.advance()
    engine.cancel(ticket)
    assert engine.advance() == [Ended(ticket, "cancelled")]
    found = answers(engine, [Request(prompt, 5)])
    assert engine.counts.prefix_tokens == CHUNK
    assert found == answers(engine_of(llama), [Request(prompt, 5)])


def piece(nbytes: int) -> RowPiece:
    return RowPiece(1, (0,), (np.zeros(nbytes - 4, np.uint8),), np.zeros((1, 1), np.float32))


def test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning():
    store, (a, b, c, d) = PrefixStore(300), (b"a", b"b", b"c", b"d")
    assert store.put([a], piece(100))
    assert store.put([a, b], piece(100))
    assert store.put([c], piece(100))
    assert len(store.longest([a, b])) == 2
    assert store.put([d], piece(100)), "c, which was not used since, makes room"
    assert ([len(store.longest(chain)) for chain in ([a, b], [c], [d])], store.nbytes) == (
        [2, 0, 1],
        300,
    )
    assert len(store.longest([a])) == 1, "only the beginning is used"
    assert store.put([c], piece(100))
    assert [len(store.longest(chain)) for chain in ([a, b], [c], [d])] == [1, 1, 1], (
        "the end, b, is older than its beginning and d"
    )
    assert not store.put([b"gone", b], piece(10)), (
        "a piece without what comes before it serves nobody"
    )
    assert not store.put([a, b"e"], piece(201)), "there is room only in place of what it continues"
    assert len(store.longest([a])) == 1
    assert not store.put([c, b"e"], piece(201))
    assert not store.put([b"e"], piece(301))
    assert [len(store.longest([key])) for key in (c, d, a)] == [1, 1, 1], "nothing goes in vain"
    assert store.put([c, b"e"], piece(150)), "c is older than d and a, and they go"
    assert [len(store.longest(chain)) for chain in ([c, b"e"], [d], [a])] == [2, 0, 0]
    with pytest.raises(ValueError, match="limit=-1 bytes"):
        PrefixStore(-1)


def test_keys_belong_to_tokens_model_and_layout(llama: Llama):
    row = kvq.init_cache(SPEC, llama.config, 1, CAPACITY)
    scopes = {
        scope_of(row, "model", 48),
        scope_of(row, "other", 48),
        scope_of(row, "model", 64),
        scope_of(dataclasses.replace(row, capacity=64), "model", 48),
        scope_of(dataclasses.replace(row, spec=kvq.parse("kivi")), "model", 48),
    }
    assert len(scopes) == 5
    one, other = (
        chunk_keys(b"x", tokens_of(0, 100), 48),
        chunk_keys(b"x", (*tokens_of(0, 99), 0), 48),
    )
    assert len(one) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert chunk_keys(b"x", tokens_of(0, 96), 48) == one[:2]
    assert not set(one) & set(chunk_keys(b"y", tokens_of(0, 100), 48))
