"""Generation for a fixed set of prompts: the host's side of `decode_loop`.

Invariants:
  * Everything is checked before a byte is allocated; a bad request changes nothing.
  * Three programs are compiled per shape (prefill chunk, start, decode) and reused for the whole run.
  * The host sees tokens once per dispatch of `steps_per_dispatch` steps.
  * A model on a mesh (`jaxkv.mesh`) runs there; the state then lies there too, and describes what one device holds.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import decode_loop
from jaxkv.cache import PagedKVCache, raise_for_status
from jaxkv.config import CacheConfig
from jaxkv.decode_loop import DecodeState
from jaxkv.ledger import fragmentation
from jaxkv.mesh import device_config, init_on, mesh_of, specs_of, spmd
from jaxkv.model import DecoderModel
from jaxkv.prompt_check import check_prompt
from jaxkv.sampling import SamplingParams, SamplingState, sampling_state
from jaxkv.status import CapacityError, StatusBit

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one sequence generated.

    Attributes:
      prompt_index: which prompt it continues.
      sample_index: which of the prompt's samples it is.
      tokens: generated ids, the end token included where there is one.
      finish_reason: "stop" (an end token), "length" (max_new_tokens), or "out_of_blocks" (the pool ran
        out; the tokens so far are valid).
    """

    prompt_index: int
    sample_index: int
    tokens: list[int]
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """Tokens that one sequence generated in the last dispatch; for streaming."""

    prompt_index: int
    sample_index: int
    tokens: list[int]


@dataclasses.dataclass
class RunStats:
    """What a run cost.  Times in seconds, blocks of the pool; compile time is not part of the others."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    dispatches: int = 0
    num_blocks: int = 0
    used_blocks: int = 0
    peak_blocks: int = 0
    peak_fragmentation: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over decode time; 0 if nothing was decoded."""
        return self.new_tokens / self.decode_s if self.decode_s > 0 else 0.0


class Generator:
    """Compiled generation for one model and one cache config.

    Args:
      model: any `DecoderModel`; its weights are arguments of the compiled programs, and say where they run.
      config: the whole cache; max_seqs is the number of sequences that run at once.
      eos_token_ids: ids that end a sequence.
      prefill_chunk: prompt tokens per row and prefill call.
      steps_per_dispatch: decode steps between two looks of the host.
      observe: called with the cache at every look, after `stats` is up to date; the next dispatch donates
        the cache, so whatever it wants to keep it must fetch.

    Attributes:
      mesh: where the model lies; None on one device.

    Raises:
      ValueError: a size is not positive, or the heads do not divide over the model's mesh.
    """

    def __init__(
        self,
        model: DecoderModel,
        config: CacheConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        prefill_chunk: int = 64,
        steps_per_dispatch: int = 16,
        observe: Callable[[PagedKVCache], None] | None = None,
    ) -> None:
        for name, value in (
            ("prefill_chunk", prefill_chunk),
            ("steps_per_dispatch", steps_per_dispatch),
        ):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.model = model
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.prefill_chunk = prefill_chunk
        self.steps_per_dispatch = steps_per_dispatch
        self.observe = observe
        self.stats = RunStats()
        self.mesh = mesh_of(model)
        self._device_config = device_config(config, self.mesh)
        self._vocab = decode_loop.vocab_size(config, model)
        self._programs: dict[Any, Callable[..., Any]] = {}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        num_samples: int = 1,
    ) -> list[Completion]:
        """Runs `stream` to its end and returns the completions, prompt by prompt."""
        events = self.stream(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, num_samples=num_samples
        )
        return [event for event in events if isinstance(event, Completion)]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        num_samples: int = 1,
    ) -> Iterator[NewTokens | Completion]:
        """Generates for all prompts at once and yields what each dispatch brought.

        Samples of one prompt share its blocks: the prompt is prefilled once and forked.  `self.stats`
        describes the run afterwards.

        Args:
          prompts: token ids of each prompt, at least one each.
          max_new_tokens: at least 1; the end token counts.
          sampling: for all prompts, or one for each.
          num_samples: sequences per prompt; sample i of a request draws with its own key.

        Yields:
          NewTokens after each dispatch, and at the end one Completion per sequence.

        Raises:
          ValueError: an empty prompt, an id outside the vocabulary, a prompt that does not fit a sequence.
          CapacityError: more sequences than slots, or prompts that need more blocks than the pool has.
          FloatingPointError: the model's logits held NaN.
        """
        params = (
            [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        )
        self._check(prompts, max_new_tokens, params, num_samples)
        return self._run(prompts, max_new_tokens, params, num_samples)

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: list[SamplingParams],
        num_samples: int,
    ) -> None:
        config = self.config
        if not prompts:
            raise ValueError("prompts: expected at least one prompt, got none")
        if len(params) != len(prompts):
            raise ValueError(f"sampling: expected {len(prompts)} entries, got {len(params)}")
        for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        for i, prompt in enumerate(prompts):
            check_prompt(f"prompts[{i}]", prompt, max_new_tokens, self._vocab, config.max_seq_len)
        num_seqs = len(prompts) * num_samples
        if num_seqs > config.max_seqs:
            raise CapacityError(
                f"more sequences than slots: need {num_seqs}, have {config.max_seqs}",
                need=num_seqs,
                free=config.max_seqs,
            )
        need = sum(-(-len(prompt) // config.block_size) for prompt in prompts)
        if need > config.num_blocks:
            raise CapacityError(
                f"pool too small for the prompts: need {need} blocks of {config.block_size} tokens, "
                f"free {config.num_blocks}",
                need=need,
                free=config.num_blocks,
            )

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        params: list[SamplingParams],
        num_samples: int,
    ) -> Iterator[NewTokens | Completion]:
        self.stats = RunStats(
            prompt_tokens=sum(map(len, prompts)), num_blocks=self.config.num_blocks
        )
        owners = [(p, i) for p in range(len(prompts)) for i in range(num_samples)]
        idle = self.config.max_seqs - len(owners)
        state = self._init(
            sampling_state(
                [params[p] for p, _ in owners] + [SamplingParams()] * idle,
                [i for _, i in owners] + [0] * idle,
            ),
            [max_new_tokens] * len(owners) + [0] * idle,
            max_new_tokens,
        )
        state = self._prefill(state, prompts, num_samples)
        source = [row - i for row, (_, i) in enumerate(owners)]
        source += list(range(len(owners), self.config.max_seqs))
        state = self._timed("decode_s", decode_loop.start, state, jnp.array(source, jnp.int32))

        seen = [0] * len(owners)
        while True:
            tokens, counts, done, not_finite, bits = jax.device_get(
                (
                    state.tokens,
                    state.num_tokens,
                    state.done,
                    state.not_finite,
                    state.cache.status.bits,
                )
            )
            self._look(state, int(counts.sum()))
            if not_finite.any():
                row = int(np.flatnonzero(not_finite)[0])
                raise FloatingPointError(
                    f"prompt {owners[row][0]}, token {counts[row]}: the model's logits are not finite"
                )
            for row, (p, i) in enumerate(owners):
                if counts[row] > seen[row]:
                    yield NewTokens(p, i, tokens[row, seen[row] : counts[row]].tolist())
                    seen[row] = int(counts[row])
            if done.all() or bits:
                break
            steps = jnp.int32(self.steps_per_dispatch)
            state = self._timed("decode_s", decode_loop.decode, state, steps)

        if bits & ~StatusBit.OUT_OF_BLOCKS:
            raise_for_status(state.cache)
        for row, (p, i) in enumerate(owners):
            mine = tokens[row, : counts[row]].tolist()
            ended = bool(mine) and mine[-1] in self.eos_token_ids
            reason = "stop" if ended else "length" if done[row] else "out_of_blocks"
            yield Completion(p, i, mine, reason)

    def _init(
        self, sampling: SamplingState, max_tokens: Sequence[int], max_new_tokens: int
    ) -> DecodeState:
        """Returns the state of a run before its prefill, where the model is."""

        def init(model: DecoderModel, sampling: Any, limits: Any, eos_ids: Any) -> DecodeState:
            args = sampling, limits, eos_ids, max_new_tokens
            return decode_loop.init_state(self._device_config, model, *args)

        eos_ids = jnp.array(self.eos_token_ids, jnp.int32)
        limits = jnp.array(max_tokens, jnp.int32)
        return init_on(self.mesh, init, self.model, sampling, limits, eos_ids)

    def _prefill(
        self, state: DecodeState, prompts: Sequence[Sequence[int]], num_samples: int
    ) -> DecodeState:
        rows, chunk = self.config.max_seqs, self.prefill_chunk
        for begin in range(0, max(map(len, prompts)), chunk):
            tokens = np.zeros((rows, chunk), np.int32)
            q_lens = np.zeros(rows, np.int32)
            for p, prompt in enumerate(prompts):
                piece = prompt[begin : begin + chunk]
                tokens[p * num_samples, : len(piece)] = piece
                q_lens[p * num_samples] = len(piece)
            state = self._timed(
                "prefill_s", decode_loop.prefill, state, jnp.asarray(tokens), jnp.asarray(q_lens)
            )
        return state

    def _timed(
        self, clock: str, step: Callable[..., State], state: State, *args: jax.Array
    ) -> State:
        """Runs one compiled step and books its time; compiles it the first time it sees these shapes."""
        key = (
            step,
            jax.tree.structure(state),
            *(x.shape for x in (*jax.tree.leaves(state), *args)),
        )
        if key not in self._programs:
            begin = time.perf_counter()
            one_device = functools.partial(step, self._device_config)
            called = self.model, state, *args
            function = spmd(one_device, self.mesh, called, specs_of(state))
            jitted = jax.jit(function, donate_argnums=1)
            self._programs[key] = jitted.lower(self.model, state, *args).compile()
            self.stats.compile_s += time.perf_counter() - begin
        begin = time.perf_counter()
        state = jax.block_until_ready(self._programs[key](self.model, state, *args))
        setattr(self.stats, clock, getattr(self.stats, clock) + time.perf_counter() - begin)
        self.stats.dispatches += 1
        return state

    def _look(self, state: DecodeState, new_tokens: int) -> None:
        """Updates the statistics from the state between two dispatches."""
        self.stats.new_tokens = new_tokens
        self.stats.peak_blocks = int(state.peak_blocks)
        self.stats.used_blocks = self.config.num_blocks - int(state.cache.pool.num_free)
        tables, kv_lens = jax.device_get((state.cache.tables.blocks, state.cache.tables.kv_lens))
        current = fragmentation(tables, kv_lens, self.config.block_size)
        self.stats.peak_fragmentation = max(self.stats.peak_fragmentation, current)
        if self.observe is not None:
            self.observe(state.cache)


def generate(
    model: DecoderModel,
    config: CacheConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    num_samples: int = 1,
    prefill_chunk: int = 64,
    steps_per_dispatch: int = 16,
) -> list[Completion]:
    """Generates for a fixed set of prompts; see `Generator` for the arguments and errors."""
    generator = Generator(
        model,
        config,
        eos_token_ids=eos_token_ids,
        prefill_chunk=prefill_chunk,
        steps_per_dispatch=steps_per_dispatch,
    )
    return generator.generate(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, num_samples=num_samples
    )
