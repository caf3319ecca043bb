"""Generation through the cache against a dense float64 twin that knows no cache."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import FakeModel, dense_greedy, dense_logits, fake_model

from jaxkv import CacheConfig, CapacityError, PagedKVCache, check_invariants, decode_loop
from jaxkv.generate import Completion, Generator, NewTokens, generate
from jaxkv.kv_store import gather_dense
from jaxkv.sampling import SamplingParams, sampling_state

CONFIG = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    num_blocks=40,
    max_seqs=4,
    max_blocks_per_seq=10,
)
MODEL = fake_model()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [2, 6, 4, 3]]
NEW = 12
SAMPLING = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, seed=1),
    SamplingParams(temperature=1.5, top_p=0.8, min_p=0.02, seed=3),
]


NO_EOS = (-7, -8)  # two ids that no model chooses: as many as the tests that stop early have

# Compiled programs by config and model structure; prompts, sampling, K and end tokens are arguments.
_programs: dict[Any, dict[Any, Any]] = {}


def generator(config: CacheConfig = CONFIG, model: Any = MODEL, **options: Any) -> Generator:
    """Returns a generator that shares its compiled programs with all tests of this module."""
    run = Generator(model, config, **{"eos_token_ids": NO_EOS} | options)
    run._programs = _programs.setdefault((config, jax.tree.structure(model)), {})
    return run


@functools.lru_cache(maxsize=32)
def greedy(index: int, max_new_tokens: int = NEW) -> tuple[int, ...]:
    """Returns what the dense twin continues a prompt with."""
    return tuple(dense_greedy(MODEL, PROMPTS[index], max_new_tokens))


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    """Returns the tokens of all completions."""
    return [tuple(completion.tokens) for completion in completions]


# The same tokens, however they are computed -----------------------------------------------------------


def test_generate_greedy_matches_the_dense_twin() -> None:
    got = generator().generate(PROMPTS, max_new_tokens=NEW)
    assert tokens_of(got) == [greedy(index) for index in range(4)]
    assert [c.finish_reason for c in got] == ["length"] * 4
    assert [(c.prompt_index, c.sample_index) for c in got] == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    "chunk", [1, 3, 7, 64, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 5))]
)
def test_generate_any_prefill_chunk_gives_the_same_tokens(chunk: int) -> None:
    """Field cases A3, A4, C1, N2: every prompt token is computed once, at its own position."""
    got = generator(prefill_chunk=chunk).generate(PROMPTS, max_new_tokens=NEW)
    assert tokens_of(got) == [greedy(index) for index in range(4)]


@pytest.mark.parametrize("steps", [1, 2, 5, 64])
def test_generate_any_steps_per_dispatch_gives_the_same_tokens(steps: int) -> None:
    run = generator(steps_per_dispatch=steps)
    assert tokens_of(run.generate(PROMPTS, max_new_tokens=NEW)) == [greedy(i) for i in range(4)]
    decode_dispatches = -(-(NEW - 1) // steps)  # `start` chooses the first token
    assert run.stats.dispatches == 1 + 1 + decode_dispatches


@pytest.mark.parametrize(
    "format", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)]
)
def test_generate_narrow_format_stays_near_the_dense_twin(format: str) -> None:
    """Tokens are equal until the twin's two best logits lie closer than the format's rounding."""
    config = dataclasses.replace(CONFIG, format=format)
    for index, got in enumerate(tokens_of(generator(config).generate(PROMPTS, max_new_tokens=NEW))):
        agreed = next((i for i in range(NEW) if got[i] != greedy(index)[i]), NEW)
        if agreed < NEW:
            last = dense_logits(MODEL, [*PROMPTS[index], *got[:agreed]])[-1]
            assert max(last) - last[got[agreed]] < 0.2


def test_generate_every_logit_matches_the_dense_twin() -> None:
    """Prefill in chunks of 3, then single tokens: hidden states through the cache, not only their argmax."""
    tokens = PROMPTS[2]
    state, step = new_state(), steps().prefill
    wide = [(begin, min(3, 9 - begin)) for begin in range(0, 9, 3)] + [(9, 1), (10, 1)]
    want = dense_logits(MODEL, tokens)
    for begin, size in wide:
        chunk = np.zeros((4, 3), np.int32)
        chunk[0, :size] = tokens[begin : begin + size]
        state = step(MODEL, state, chunk, np.array([size, 0, 0, 0], np.int32))
        logits = MODEL.unembed(state.last_hidden[0])
        np.testing.assert_allclose(logits, want[begin + size - 1], atol=2e-4)


def test_generate_sliding_window_matches_the_dense_twin() -> None:
    """Field case K1: a window of 3 over prompts and continuations several times as long."""
    model = fake_model(window=3, seed=1)
    got = generator(model=model, prefill_chunk=4).generate(PROMPTS, max_new_tokens=NEW)
    for index, tokens in enumerate(tokens_of(got)):
        assert list(tokens) == dense_greedy(model, PROMPTS[index], NEW)


@pytest.mark.parametrize("sampling", [[SamplingParams()] * 4, SAMPLING], ids=["greedy", "mixed"])
def test_generate_alone_gives_the_tokens_of_the_batch(sampling: list[SamplingParams]) -> None:
    run = generator()
    together = tokens_of(run.generate(PROMPTS, max_new_tokens=NEW, sampling=sampling))
    for index, prompt in enumerate(PROMPTS):
        alone = run.generate([prompt], max_new_tokens=NEW, sampling=sampling[index])
        assert tokens_of(alone) == [together[index]]
    backwards = run.generate(PROMPTS[::-1], max_new_tokens=NEW, sampling=sampling[::-1])
    assert tokens_of(backwards) == together[::-1]


def test_generate_seed_decides_the_sampled_tokens() -> None:
    run = generator()
    hot = [SamplingParams(temperature=2.0, seed=seed) for seed in (1, 1, 2, 3)]
    first = tokens_of(run.generate([PROMPTS[0]] * 4, max_new_tokens=NEW, sampling=hot))
    assert first[0] == first[1]
    assert len(set(first)) == 3
    assert tokens_of(run.generate([PROMPTS[0]] * 4, max_new_tokens=NEW, sampling=hot)) == first


def test_generate_after_the_longest_row_ends_the_others_go_on_alike() -> None:
    """Field case J4: rows of length 11 and 3; the long one stops first, by its end token."""
    longest = PROMPTS[2]
    eos = greedy(2)[3]
    short = greedy(1)
    if eos in short:
        short = short[: short.index(eos) + 1]
    run = generator(eos_token_ids=(eos, eos), steps_per_dispatch=2)
    got = run.generate([longest, PROMPTS[1]], max_new_tokens=NEW)
    assert tokens_of(got)[1] == short
    assert len(got[0].tokens) < NEW


# Stopping ---------------------------------------------------------------------------------------------


def test_generate_stops_each_row_at_its_first_end_token() -> None:
    """Field case O5: either of two end tokens stops a row; the end token is kept."""
    eos = (greedy(0)[4], greedy(3)[2])
    got = generator(eos_token_ids=eos).generate(PROMPTS, max_new_tokens=NEW)
    for index, completion in enumerate(got):
        want = list(greedy(index))
        stops = [i for i, token in enumerate(want) if token in eos]
        assert completion.tokens == (want[: stops[0] + 1] if stops else want)
        assert completion.finish_reason == ("stop" if stops else "length")
    assert got[0].finish_reason == got[3].finish_reason == "stop"


def test_generate_first_token_may_be_the_end() -> None:
    got = generator(eos_token_ids=(greedy(0)[0],) * 2).generate([PROMPTS[0]], max_new_tokens=NEW)
    assert got == [Completion(0, 0, [greedy(0)[0]], "stop")]


def test_generate_one_new_token_needs_no_decode() -> None:
    run = generator()
    got = run.generate(PROMPTS, max_new_tokens=1)
    assert tokens_of(got) == [greedy(index)[:1] for index in range(4)]
    assert run.stats.dispatches == 2


def test_generate_at_the_end_every_block_is_free() -> None:
    """Field cases C1 and C6: the device releases every row as it ends."""
    looks: list[tuple[int, list[int]]] = []

    def observe(cache: PagedKVCache) -> None:
        check_invariants(CONFIG, cache)
        looks.append((int(cache.pool.num_free), np.asarray(cache.tables.kv_lens).tolist()))

    run = generator(eos_token_ids=(greedy(0)[4],) * 2, steps_per_dispatch=1, observe=observe)
    run.generate(PROMPTS, max_new_tokens=NEW)
    assert looks[-1] == (CONFIG.num_blocks, [0, 0, 0, 0])
    lengths = [kv_lens[0] for _, kv_lens in looks]
    assert lengths == [7, 8, 9, 10, *[0] * (len(lengths) - 4)], "row 0 let go as soon as it ended"
    for free, kv_lens in looks:
        assert free == CONFIG.num_blocks - sum(-(-n // CONFIG.block_size) for n in kv_lens)


def test_generate_peak_blocks_are_counted() -> None:
    run = generator()
    run.generate([PROMPTS[0]], max_new_tokens=NEW)
    held = len(PROMPTS[0]) + NEW - 1  # the last token is never written
    assert run.stats.peak_blocks == -(-held // CONFIG.block_size)
    assert run.stats.new_tokens == NEW


def test_stream_yields_what_the_completions_hold() -> None:
    run = generator(steps_per_dispatch=5)
    events = list(run.stream(PROMPTS, max_new_tokens=NEW))
    pieces = Counter[int]()
    told: dict[int, list[int]] = {index: [] for index in range(4)}
    for event in events:
        if isinstance(event, NewTokens):
            pieces[event.prompt_index] += 1
            told[event.prompt_index] += event.tokens
    assert [told[index] for index in range(4)] == [list(greedy(index)) for index in range(4)]
    assert set(pieces.values()) == {4}, "1 token by `start`, then 5, 5 and 1"


# Several samples of one prompt ------------------------------------------------------------------------


def cache_looks(config: CacheConfig, num_samples: int, sampling: SamplingParams) -> list[Any]:
    """Returns (blocks in use, kv_lens, references) at every look of a run with one step a dispatch."""
    looks: list[Any] = []

    def observe(cache: PagedKVCache) -> None:
        check_invariants(config, cache)
        refs = np.asarray(cache.pool.ref_counts)
        used = config.num_blocks - int(cache.pool.num_free)
        looks.append((used, np.asarray(cache.tables.kv_lens), Counter(refs[refs > 0].tolist())))

    run = generator(config, steps_per_dispatch=1, observe=observe)
    run.generate([PROMPTS[0]], max_new_tokens=NEW, num_samples=num_samples, sampling=sampling)
    assert run.stats.prompt_tokens == len(PROMPTS[0])
    return looks


def test_generate_samples_share_the_prompts_blocks() -> None:
    """Field case D9: a prompt of 7 tokens with n = 4 is computed once: two blocks with four owners each.

    The first new token is written into the shared tail: three copies; block 0 stays shared.
    """
    looks = cache_looks(CONFIG, 4, SamplingParams(temperature=1.0))
    used, kv_lens, refs = looks[0]
    assert (used, kv_lens.tolist(), refs) == (2, [7] * 4, Counter({4: 2}))
    used, kv_lens, refs = looks[1]
    assert (used, kv_lens.tolist(), refs) == (5, [8] * 4, Counter({4: 1, 1: 4}))
    used, _, refs = looks[2]
    assert (used, refs) == (9, Counter({4: 1, 1: 8})), "a new block each, no copy at a block's edge"
    assert looks[-1][0] == 0


def test_generate_samples_differ_and_match_a_lone_prefill() -> None:
    """Each sample is what the same key draws without sharing: forked blocks hold the prompt's own K/V."""
    hot = SamplingParams(temperature=1.0, seed=5)
    run = generator()
    got = run.generate([PROMPTS[0]], max_new_tokens=NEW, num_samples=4, sampling=hot)
    assert [(c.prompt_index, c.sample_index) for c in got] == [(0, i) for i in range(4)]
    assert len({tuple(c.tokens) for c in got}) == 4
    for completion in got:
        tokens: list[int] = list(PROMPTS[0])
        state = sampling_state([hot], [completion.sample_index])
        for position, token in enumerate(completion.tokens):
            logits = jnp.asarray(dense_logits(MODEL, tokens)[-1:], jnp.float32)
            assert int(_sample(state, logits, jnp.array([position]))[0]) == token
            tokens.append(token)


_sample = jax.jit(lambda *args: decode_loop.sample(*args))


def test_generate_greedy_samples_are_equal() -> None:
    got = generator().generate(PROMPTS[:2], max_new_tokens=NEW, num_samples=2)
    assert tokens_of(got) == [greedy(0), greedy(0), greedy(1), greedy(1)]


# Out of blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 16])
def test_generate_out_of_blocks_keeps_the_tokens_so_far(steps: int) -> None:
    """Field case P1's kind: the pool holds the prompts and little more; what was made is right."""
    config = dataclasses.replace(CONFIG, num_blocks=9)
    run = generator(config, steps_per_dispatch=steps)
    got = run.generate(PROMPTS, max_new_tokens=NEW)
    assert [c.finish_reason for c in got] == ["out_of_blocks"] * 4
    for index, completion in enumerate(got):
        length = len(completion.tokens)
        assert 0 < length < NEW
        assert completion.tokens == list(greedy(index, NEW)[:length])
    held = sum(-(-(len(p) + len(c.tokens) - 1) // 4) for p, c in zip(PROMPTS, got, strict=True))
    assert (
        held
        <= 9
        < sum(-(-(len(p) + len(c.tokens)) // 4) for p, c in zip(PROMPTS, got, strict=True))
    )


def test_generate_after_out_of_blocks_the_next_run_is_whole() -> None:
    run = generator(dataclasses.replace(CONFIG, num_blocks=9), steps_per_dispatch=16)
    run.generate(PROMPTS, max_new_tokens=NEW)
    assert tokens_of(run.generate([PROMPTS[1]], max_new_tokens=NEW)) == [greedy(1)]


def test_generate_samples_that_do_not_fit_are_reported() -> None:
    """Field case D3's kind: four samples of 7 tokens share 1 of 9 blocks and fill two more each.

    The 13th token of any of them needs a tenth block; until then each has made six.
    """
    config = dataclasses.replace(CONFIG, num_blocks=9)
    hot = SamplingParams(temperature=1.0, seed=5)
    got = generator(config).generate([PROMPTS[0]], max_new_tokens=NEW, num_samples=4, sampling=hot)
    assert [(c.finish_reason, len(c.tokens)) for c in got] == [("out_of_blocks", 6)] * 4
    whole = generator().generate([PROMPTS[0]], max_new_tokens=NEW, num_samples=4, sampling=hot)
    assert tokens_of(got) == [tokens[:6] for tokens in tokens_of(whole)]


# Not a number -----------------------------------------------------------------------------------------


def spoiled(row: Callable[[np.ndarray], Any]) -> FakeModel:
    """Returns the model with the embedding changed in place by `row`."""
    embed = np.array(MODEL.embed)
    row(embed)
    return dataclasses.replace(MODEL, embed=jnp.asarray(embed))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_generate_nan_logits_raise_and_are_never_token_0(value: float) -> None:
    """Field case O6: NaN logits of one row raise; argmax would have said token 0."""

    def spoil(embed: np.ndarray) -> None:
        embed[8] = value  # only the third prompt holds token 8

    run = generator(model=spoiled(spoil))
    with pytest.raises(
        FloatingPointError, match=r"^prompt 2, token 0: the model's logits are not finite"
    ):
        run.generate(PROMPTS, max_new_tokens=NEW)


def test_generate_nan_logits_in_a_later_token_raise_there() -> None:
    """The row that breaks at its third token is named; what was streamed before is right."""
    fourth = greedy(0)[2]
    assert fourth not in (*PROMPTS[0], *greedy(0)[:2])

    def spoil(embed: np.ndarray) -> None:
        embed[fourth] = np.nan

    run = generator(model=spoiled(spoil), steps_per_dispatch=1)
    events = run.stream([PROMPTS[0]], max_new_tokens=NEW)
    told = [token for _ in range(3) for token in next(events).tokens]
    with pytest.raises(FloatingPointError, match=r"^prompt 0, token 3:"):
        next(events)
    assert told == list(greedy(0)[:3])


# Compilation and transfers ----------------------------------------------------------------------------


def test_generate_whole_run_traces_each_program_once() -> None:
    """Prompts of other lengths, other K, other sampling: three programs, each traced once."""
    traces = Counter[tuple[int, ...]]()

    @functools.partial(jax.tree_util.register_dataclass, data_fields=["model"], meta_fields=[])
    @dataclasses.dataclass(frozen=True)
    class Counting:
        model: FakeModel

        def __call__(self, tokens: Any, store: Any, view: Any) -> Any:
            traces[tokens.shape] += 1
            return self.model(tokens, store, view)

        def unembed(self, hidden: Any) -> Any:
            return self.model.unembed(hidden)

    run = Generator(
        Counting(MODEL), CONFIG, eos_token_ids=NO_EOS, prefill_chunk=5, steps_per_dispatch=3
    )
    run.generate(PROMPTS, max_new_tokens=NEW)
    traces.clear()
    run.generate(PROMPTS[1:3], max_new_tokens=NEW, sampling=SAMPLING[:2])
    run.generate([PROMPTS[2]], max_new_tokens=NEW, num_samples=4, sampling=SAMPLING[2])
    assert set(traces) <= {(4, 1)}, "the shape probe of a run's state is all that may trace again"
    assert run.stats.compile_s == 0


class Steps(NamedTuple):
    """The three programs of a run, jitted by hand; donating nothing, so that states can be compared."""

    prefill: Callable[..., decode_loop.DecodeState]
    start: Callable[..., decode_loop.DecodeState]
    decode: Callable[..., decode_loop.DecodeState]


@functools.lru_cache(maxsize=1)
def steps() -> Steps:
    """Returns the programs for CONFIG, shared by the tests below."""
    programs = (decode_loop.prefill, decode_loop.start, decode_loop.decode)
    return Steps(*(jax.jit(functools.partial(program, CONFIG)) for program in programs))


def new_state() -> decode_loop.DecodeState:
    """Returns the state of an empty cache with two greedy and two sampling rows."""
    return decode_loop.init_state(
        CONFIG,
        MODEL,
        sampling_state(SAMPLING, [0] * 4),
        jnp.full(4, NEW, jnp.int32),
        jnp.array(NO_EOS, jnp.int32),
        NEW,
    )


def prefilled(
    sequences: Sequence[Sequence[int]], state: decode_loop.DecodeState | None = None
) -> decode_loop.DecodeState:
    """Returns the state after one prefill of up to 16 tokens a row."""
    tokens = np.zeros((4, 16), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    q_lens = jnp.array([len(sequence) for sequence in sequences], jnp.int32)
    tokens, state = jnp.asarray(tokens), state or new_state()
    with jax.transfer_guard("disallow"):
        return steps().prefill(MODEL, state, tokens, q_lens)


def test_decode_makes_no_transfer() -> None:
    """All three programs run under a guard that forbids every transfer between host and device."""
    state, num_steps, rows = prefilled(PROMPTS), jnp.int32(NEW), jnp.arange(4, dtype=jnp.int32)
    with jax.transfer_guard("disallow"):
        state = steps().start(MODEL, state, rows)
        state = steps().decode(MODEL, state, num_steps)
    assert tuple(np.asarray(state.tokens)[1].tolist()) == greedy(1)
    assert np.all(np.asarray(state.done))


def test_decode_over_a_pool_of_nan_gives_the_same_tokens() -> None:
    """Field cases E1, E3, E4: unwritten slots are NaN, and a warm-up ran every row empty before."""

    def run(state: decode_loop.DecodeState) -> list[list[int]]:
        state = prefilled(PROMPTS, prefilled([[]] * 4, state))
        state = steps().start(MODEL, state, jnp.arange(4, dtype=jnp.int32))
        return np.asarray(steps().decode(MODEL, state, jnp.int32(NEW)).tokens).tolist()

    state = new_state()
    store = dataclasses.replace(state.cache.store, kv=jnp.full_like(state.cache.store.kv, jnp.nan))
    spoilt = dataclasses.replace(state, cache=dataclasses.replace(state.cache, store=store))
    assert run(spoilt) == run(state)


def test_decode_cache_holds_the_tokens_it_generated() -> None:
    """K/V read back mid-run equal those of a prefill of the same tokens, for a run split anywhere."""
    read = jax.jit(functools.partial(gather_dense, kv_len=CONFIG.max_seq_len))
    rows = jnp.arange(4, dtype=jnp.int32)
    state = steps().decode(MODEL, steps().start(MODEL, prefilled(PROMPTS), rows), jnp.int32(2))
    state = steps().decode(MODEL, state, jnp.int32(3))
    made = np.asarray(state.tokens)[:, :5].tolist()  # the sixth is chosen, not yet written
    whole = prefilled([[*prompt, *made[row]] for row, prompt in enumerate(PROMPTS)])
    for row, prompt in enumerate(PROMPTS):
        length = len(prompt) + 5
        assert int(state.cache.tables.kv_lens[row]) == length
        got = read(state.cache.store, state.cache.tables.blocks[row])
        want = read(whole.cache.store, whole.cache.tables.blocks[row])
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one[:, :length], other[:, :length], atol=1e-5)


# Bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts: expected at least one prompt, got none"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: expected at least one token, got an empty prompt"),
        ({"prompts": [[1, 31]]}, r"prompts\[0\]: expected token ids in \[0, 31\), got 31"),
        ({"prompts": [[1], [-1]]}, r"prompts\[1\]: expected token ids in \[0, 31\), got -1"),
        ({"prompts": [[1] * 29]}, "within the 40 tokens of a sequence, got 29 \\+ 12"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"num_samples": 0}, "num_samples: expected at least 1, got 0"),
        ({"sampling": [SamplingParams()] * 3}, "sampling: expected 1 entries, got 3"),
    ],
)
def test_generate_bad_request_raises_before_anything_runs(
    change: dict[str, Any], message: str
) -> None:
    run = generator()
    stats = run.stats
    with pytest.raises(ValueError, match=message):
        run.stream(**{"prompts": [[1, 2]], "max_new_tokens": NEW} | change)
    assert run.stats is stats, "the last run's figures are untouched"


def test_generate_function_checks_like_the_generator() -> None:
    with pytest.raises(
        ValueError, match=r"prompts\[0\]: expected at least one token, got an empty"
    ):
        generate(MODEL, CONFIG, [[]], max_new_tokens=NEW)


def test_generate_prompt_and_new_tokens_of_the_exact_length_fit() -> None:
    (got,) = generator().generate([[1] * 28], max_new_tokens=12)
    assert len(got.tokens) == 12


def test_generate_more_sequences_than_slots_says_both() -> None:
    with pytest.raises(CapacityError, match="more sequences than slots: need 6, have 4") as error:
        generator().generate(PROMPTS[:3], max_new_tokens=NEW, num_samples=2)
    assert (error.value.need, error.value.free) == (6, 4)


def test_generate_pool_too_small_for_the_prompts_says_need_and_free() -> None:
    """Field case P1: refused at once, with numbers; a smaller request still runs."""
    run = generator(dataclasses.replace(CONFIG, num_blocks=9))
    with pytest.raises(CapacityError, match="need 10 blocks of 4 tokens, free 9") as error:
        run.generate([PROMPTS[2], [1] * 28], max_new_tokens=NEW)
    assert (error.value.need, error.value.free) == (10, 9)
    assert tokens_of(run.generate([PROMPTS[1]], max_new_tokens=NEW)) == [greedy(1)]


@pytest.mark.parametrize("option", ["prefill_chunk", "steps_per_dispatch"])
def test_generator_size_below_1_raises(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected at least 1, got 0"):
        Generator(MODEL, CONFIG, **{option: 0})


def test_generator_kv_heads_that_do_not_divide_raise() -> None:
    """Field case M1's kind: 4 q heads over 3 kv heads."""
    model = fake_model(num_kv_heads=3)
    with pytest.raises(ValueError, match="the 3 kv heads divide, got 4"):
        Generator(model, dataclasses.replace(CONFIG, num_kv_heads=3))


def test_generator_cache_of_another_shape_raises() -> None:
    with pytest.raises(ValueError, match=r"k: expected .* got "):
        Generator(MODEL, dataclasses.replace(CONFIG, head_dim=16))
