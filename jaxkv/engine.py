"""Continuous batching: the host's small part of serving many requests.

Between two dispatches the host admits requests to slots, chooses which rows the next program runs, and passes on what
the last one brought.  Growth, sampling, stopping and release happen on the device (`engine_loop`).

    submit -> waiting -> slot: prefill, chunk by chunk -> decode, K steps a dispatch -> finished
                 ^                                          |
                 +------- preempted: its blocks stay findable, its tokens become a longer prompt

Invariants:
  * A sequence's tokens depend on its request alone, not on the batch, the chunks, K, drafts or preemption (up to what the
    model's own rounding makes of other shapes).
  * A request that could never fit is refused by `submit`; one that runs always fits alone, so the engine comes to its end.
  * Order is (priority, arrival): whoever comes first starts first, and is preempted last.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jaxkv import decode_loop, engine_loop
from jaxkv.config import CacheConfig
from jaxkv.engine_loop import Report
from jaxkv.engine_programs import Programs, make_shapes, placement
from jaxkv.eviction import Fair, Policy, lru
from jaxkv.model import DecoderModel
from jaxkv.request import Event, FinishReason, Handle, Output, Request
from jaxkv.status import CapacityError, StatusBit, TransitionError
from jaxkv.stop_text import StopText, TextStream


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; `models.qwen.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]: ...
    def stream(self) -> TextStream: ...


@dataclasses.dataclass
class EngineStats:
    """What an engine has done since it was built, and where it stands.

    Attributes:
      num_submitted, num_finished: requests.
      num_preemptions: sequences that had to give up their slot.
      prompt_tokens, new_tokens: of sequences that started; tokens generated.
      found_tokens: prompt tokens that were in the cache already (a resumed sequence's among them).
      dispatches, num_compiles: calls of compiled programs, and compiles.
      compile_s, device_s, host_s: seconds of compiling, of waiting for the device, and of everything else in `step`.
      num_drafted, num_accepted: drafted tokens checked, and right.
      num_waiting, num_running: sequences now.
      num_free, num_cached, num_blocks: blocks now; the live ones are the rest.
    """

    num_submitted: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    new_tokens: int = 0
    dispatches: int = 0
    num_compiles: int = 0
    compile_s: float = 0.0
    device_s: float = 0.0
    host_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_blocks: int = 0

    @property
    def num_live(self) -> int:
        """Blocks that running sequences hold."""
        return self.num_blocks - self.num_free - self.num_cached


@dataclasses.dataclass(eq=False)
class _Sequence:
    """One sample of a request, on the host.

    Attributes:
      handle, output: whose it is, and what it brings.
      rank: place in the order of service; smaller is earlier.
      text: its decoder, if there is a tokenizer.
      slot: None while it waits.
      num_tokens, kv_len: prompt and generated tokens; how many of them the cache holds.
      started: whether its prompt has been computed once.
    """

    handle: Handle
    output: Output
    rank: tuple[int, int, int]
    text: StopText | None
    slot: int | None = None
    num_tokens: int = 0
    kv_len: int = 0
    started: bool = False

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return self.num_tokens - self.kv_len

    @property
    def in_prefill(self) -> bool:
        """Whether it needs `feed`: it holds nothing yet, or lacks more than its last token."""
        return self.kv_len == 0 or self.left > 1

    @property
    def tenant(self) -> int:
        """Whom its blocks are charged to."""
        return self.handle.request.namespace.tenant

    @property
    def max_len(self) -> int:
        """Tokens at which it ends."""
        return len(self.handle.prompt) + self.handle.request.max_tokens


class Engine:
    """Serves requests on one model and one pool; one thread calls it.

    Args:
      model: any `DecoderModel`.
      config: the cache; max_seqs is the number of sequences that run at once.
      tokenizer: for prompts and outputs as text; None: token ids only.
      eos_token_ids: tokens that end a sequence.
      policy: which cached block goes first when blocks run short.
      prefill_tokens: prompt tokens of one prefill dispatch.
      max_steps: decode steps of one dispatch at most.
      draft_len: drafted tokens a step (prompt lookup); 0 switches speculation off.
      max_stop_ids: end tokens of a request at most, the engine's among them.
      prefill_shapes: (rows, tokens a row) of the prefill programs; None: a few that make up `prefill_tokens`.
      compiler_options: for XLA.

    Raises:
      ValueError: a size is out of range.
    """

    def __init__(
        self,
        model: DecoderModel,
        config: CacheConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        policy: Policy = lru,
        prefill_tokens: int = 256,
        max_steps: int = 16,
        draft_len: int = 0,
        max_stop_ids: int = 8,
        prefill_shapes: Sequence[tuple[int, int]] | None = None,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        least = {"prefill_tokens": 1, "max_steps": 1, "draft_len": 0}
        given = {
            "prefill_tokens": prefill_tokens,
            "max_steps": max_steps,
            "draft_len": draft_len,
            "max_stop_ids": max_stop_ids,
        }
        for name, value in given.items():
            lowest = least.get(name, max(1, len(set(eos_token_ids))))
            if value < lowest:
                raise ValueError(f"{name}: expected at least {lowest}, got {value}")
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.policy = policy
        self.shapes = make_shapes(config, prefill_tokens, max_steps, draft_len, max_stop_ids)
        if prefill_shapes is not None:
            self.shapes = dataclasses.replace(self.shapes, prefill=_checked(config, prefill_shapes))
        self._programs = Programs(model, config, policy, self.shapes, compiler_options)
        self._vocab = decode_loop.vocab_size(config, model)
        self._waiting: list[_Sequence] = []
        self._running: dict[int, _Sequence] = {}
        self._stats = EngineStats(num_free=config.num_blocks, num_blocks=config.num_blocks)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            self.abort(handle)

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._waiting and not self._running

    @property
    def handles(self) -> list[Handle]:
        """The requests that have not ended, in order of submission."""
        return [
            h for _, h in sorted({seq.handle.id: seq.handle for seq in self._sequences()}.items())
        ]

    @property
    def stats(self) -> EngineStats:
        """The figures of this moment; a copy."""
        programs = self._programs
        return dataclasses.replace(
            self._stats,
            dispatches=programs.num_dispatches,
            num_compiles=programs.num_compiles,
            compile_s=programs.compile_s,
            device_s=programs.device_s,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
        )

    def warm_up(self) -> int:
        """Compiles every program there will be; returns how many there are."""
        return self._programs.warm_up()

    def submit(self, request: Request) -> Handle:
        """Queues a request.

        Raises:
          ValueError: text without a tokenizer, an id outside the vocabulary, more tokens than a sequence holds, too
            many end tokens, a tenant without a weight.
          CapacityError: it would not fit the pool if it were alone.
        """
        prompt = self._encode(request)
        self._check(request, prompt)
        number = self._stats.num_submitted
        outputs = [Output(i) for i in range(request.num_samples)]
        handle = Handle(number, request, prompt, outputs)
        for output in outputs:
            text = StopText(self.tokenizer.stream(), request.stop) if self.tokenizer else None
            rank = (-request.priority, number, output.sample_index)
            self._waiting.append(_Sequence(handle, output, rank, text, num_tokens=len(prompt)))
        self._waiting.sort(key=lambda seq: seq.rank)
        self._stats.num_submitted += 1
        return handle

    def abort(self, handle: Handle) -> list[Event]:
        """Ends what still runs of a request and gives its blocks back; does nothing where it has ended."""
        mine = [seq for seq in self._sequences() if seq.handle is handle]
        self._leave([seq for seq in mine if seq.slot is not None])
        self._waiting = [seq for seq in self._waiting if seq.handle is not handle]
        return [self._finish(seq, FinishReason.ABORT) for seq in mine]

    def preempt(self, handle: Handle) -> None:
        """Sends the running sequences of a request back to the queue; they go on later where they were."""
        self._preempt([seq for seq in self._running.values() if seq.handle is handle])

    def step(self) -> list[Event]:
        """Places what has room, computes one chunk of prompts and one burst of tokens; returns what came of it."""
        begin, programs = time.perf_counter(), self._programs
        away = programs.device_s + programs.compile_s
        self._place_waiting()
        events = self._feed() + self._decode()
        away = programs.device_s + programs.compile_s - away
        self._stats.host_s += time.perf_counter() - begin - away
        return events

    def events(self) -> Iterator[Event]:
        """Steps until nothing is left to do, and yields every event."""
        while not self.idle:
            yield from self.step()

    def run_until_idle(self) -> list[Event]:
        """Returns the events of all steps until nothing is left to do."""
        return list(self.events())

    # Admission ------------------------------------------------------------------------------------

    def _encode(self, request: Request) -> tuple[int, ...]:
        if self.tokenizer is None and (isinstance(request.prompt, str) or request.stop):
            raise ValueError(
                "tokenizer: expected one for text prompts and stop strings, the engine has none"
            )
        if not isinstance(request.prompt, str):
            return tuple(int(token) for token in request.prompt)
        assert self.tokenizer is not None
        return tuple(self.tokenizer.encode(request.prompt))

    def _check(self, request: Request, prompt: tuple[int, ...]) -> None:
        config = self.config
        if not prompt:
            raise ValueError("prompt: expected at least one token, got an empty prompt")
        bad = [token for token in (*prompt, *request.stop_ids) if not 0 <= token < self._vocab]
        if bad:
            raise ValueError(f"prompt: expected token ids in [0, {self._vocab}), got {bad[0]}")
        total = len(prompt) + request.max_tokens
        if total > config.max_seq_len:
            raise ValueError(
                f"prompt: expected prompt and new tokens within the {config.max_seq_len} tokens of a "
                f"sequence, got {len(prompt)} + {request.max_tokens}"
            )
        if len(self._stop_ids(request)) > self.shapes.max_stop_ids:
            raise ValueError(
                f"stop_ids: expected at most {self.shapes.max_stop_ids} end tokens, got "
                f"{len(self._stop_ids(request))}"
            )
        tenant, lanes = request.namespace.tenant, self.policy.num_lanes
        if 1 < lanes <= tenant:
            raise ValueError(f"namespace.tenant: expected one in [0, {lanes}), got {tenant}")
        need = -(-(total - 1) // config.block_size)
        if need > config.num_blocks:
            raise CapacityError(
                f"pool too small for the request: need {need} blocks of {config.block_size} tokens, the "
                f"pool has {config.num_blocks}",
                need=need,
                free=config.num_blocks,
            )

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        eos = () if request.ignore_eos else self.eos_token_ids
        return tuple(sorted({*eos, *request.stop_ids}))

    def _place_waiting(self) -> None:
        """Gives free slots to waiting sequences, in order, as long as their tokens have room."""
        free_slots = [i for i in range(self.config.max_seqs) if i not in self._running]
        fresh = [seq.num_tokens for seq in self._running.values() if seq.kv_len == 0]
        promised = sum(map(self._blocks_for, fresh))
        room = self._stats.num_free + self._stats.num_cached - promised
        for seq in list(self._waiting):
            if not free_slots:
                return
            if self._waits_for_sibling(seq):
                continue
            room -= self._blocks_for(seq.num_tokens)
            if room < 0 and self._running:
                return
            self._place(seq, free_slots.pop(0))

    def _blocks_for(self, num_tokens: int) -> int:
        """Blocks of a sequence that is to take one more token."""
        return num_tokens // self.config.block_size + 1

    def _waits_for_sibling(self, seq: _Sequence) -> bool:
        """Whether another sample of its request is computing the prompt that it will then find."""
        siblings = (s for s in self._running.values() if s.handle is seq.handle)
        return any(not sibling.started for sibling in siblings)

    def _place(self, seq: _Sequence, slot: int) -> None:
        request, config = seq.handle.request, self.config
        namespace = dataclasses.replace(request.namespace, format=config.format)
        sampling = dataclasses.asdict(request.sampling)
        self._programs.place(
            placement(
                config,
                self.shapes,
                slot,
                (*seq.handle.prompt, *seq.output.tokens),
                len(seq.handle.prompt),
                seq.max_len,
                self._stop_ids(request),
                namespace=namespace.words(),
                sample_index=seq.output.sample_index,
                **sampling,
            )
        )
        if not seq.started:
            self._stats.prompt_tokens += len(seq.handle.prompt)
        self._waiting.remove(seq)
        self._running[slot] = seq
        seq.slot = slot

    # Dispatches -----------------------------------------------------------------------------------

    def _feed(self) -> list[Event]:
        rows = sorted((s for s in self._running.values() if s.in_prefill), key=lambda s: s.rank)
        if not rows:
            return []
        num_rows, chunk = self.shapes.choose_prefill([seq.left for seq in rows])
        rows = rows[:num_rows]
        report = self._programs.feed([_slot(seq) for seq in rows], num_rows, chunk)
        self._stats.found_tokens += int(report.num_found.sum())
        for seq in rows:
            slot = _slot(seq)
            if seq.output.sample_index == 0 and not seq.started and seq.kv_len == 0:
                seq.handle.num_found = int(report.num_found[slot])
            seq.started |= int(report.kv_lens[slot]) == seq.num_tokens or bool(report.finish[slot])
        return self._take(report)

    def _decode(self) -> list[Event]:
        rows = [seq for seq in self._running.values() if not seq.in_prefill]
        if not rows:
            return []
        lasts = [seq.max_len - seq.num_tokens for seq in rows]
        steps = min(self.shapes.max_steps, max(lasts))
        if len(rows) < len(self._running):  # prompts wait for the device
            steps = min(steps, max(1, self.shapes.max_steps // 4))
        elif self._waiting and len(self._running) == self.config.max_seqs:  # a slot is wanted
            steps = min(steps, max(min(lasts), 1))
        report = self._programs.decode([_slot(seq) for seq in rows], steps)
        return self._take(report)

    def _take(self, report: Report) -> list[Event]:
        """Books what a dispatch brought, and makes room if it ran out of blocks."""
        self._note(report)
        events = []
        for slot, seq in list(self._running.items()):
            num_new = int(report.num_tokens[slot]) - seq.num_tokens
            seq.num_tokens += num_new
            seq.kv_len = int(report.kv_lens[slot])
            code = int(report.finish[slot])
            if num_new or code:
                tokens = report.tokens[slot, :num_new].tolist()
                event = self._book(seq, tokens, report.logprobs[slot, :num_new].tolist(), code)
                events.append(event)
        # A stop string ends a row that the device still runs.
        self._leave([s for s in self._running.values() if s.output.finish_reason is not None])
        bits = StatusBit(int(report.bits))
        if bits & ~StatusBit.OUT_OF_BLOCKS:
            raise TransitionError(bits)
        return events + (self._relieve(int(report.need_blocks)) if bits else [])

    def _note(self, report: Report) -> None:
        self._stats.num_free = int(report.num_free)
        self._stats.num_cached = int(report.num_cached)
        self._stats.num_drafted = int(report.num_drafted)
        self._stats.num_accepted = int(report.num_accepted)

    def _book(self, seq: _Sequence, tokens: list[int], logprobs: list[float], code: int) -> Event:
        """Appends new tokens to the output; ends it if the device ended the row or a stop string came."""
        text, kept, stopped = self._decode_text(seq, tokens, code)
        tokens, logprobs = tokens[:kept], logprobs[:kept]
        output = seq.output
        output.tokens += tokens
        output.logprobs += logprobs
        output.text += text
        self._stats.new_tokens += len(tokens)
        reason = error = None
        if stopped or code == engine_loop.STOP:
            reason = FinishReason.STOP
        elif code == engine_loop.LENGTH:
            reason = FinishReason.LENGTH
        elif code == engine_loop.NOT_FINITE:
            reason = FinishReason.ERROR
            where = f"request {seq.handle.id}, token {len(output.tokens)}"
            error = FloatingPointError(f"{where}: the model's logits are not finite")
        if code:
            del self._running[_slot(seq)]
            seq.slot = None
        if reason is None:
            new = tuple(tokens), tuple(logprobs), text
            return Event(seq.handle, output.sample_index, *new)
        event = self._finish(seq, reason, error)
        return dataclasses.replace(event, tokens=tuple(tokens), logprobs=tuple(logprobs), text=text)

    def _decode_text(self, seq: _Sequence, tokens: list[int], code: int) -> tuple[str, int, bool]:
        """Returns new text, how many of the tokens it takes, and whether a stop string came."""
        if seq.text is None:
            return "", len(tokens), False
        pieces = []
        ends = len(tokens) - (code == engine_loop.STOP)  # the end token is no text
        for i, token in enumerate(tokens[:ends]):
            piece, stopped = seq.text.push(token)
            pieces.append(piece)
            if stopped:
                return "".join(pieces), i + 1, True
        if code:
            piece, stopped = seq.text.flush()
            pieces.append(piece)
            if stopped:
                return "".join(pieces), len(tokens), True
        return "".join(pieces), len(tokens), False

    # Leaving --------------------------------------------------------------------------------------

    def _relieve(self, need: int) -> list[Event]:
        """Preempts the policy's victim; a sequence that is alone and still lacks blocks fails."""
        victim = self._victim()
        if len(self._running) > 1:
            self._preempt([victim])
            return []
        free = self._stats.num_free
        self._leave([victim])
        message = f"out of blocks: the request needs {need} more, {free} are free and no cached block may be evicted"
        return [self._finish(victim, FinishReason.ERROR, CapacityError(message, need, free))]

    def _victim(self) -> _Sequence:
        """Returns the last in the order of service; under `Fair`, of the tenant that holds most for its weight."""
        running = list(self._running.values())
        if isinstance(self.policy, Fair):
            held: collections.Counter[int] = collections.Counter()
            for seq in running:
                held[seq.tenant] += self._blocks_for(seq.kv_len)
            weights = self.policy.weights
            greedy = max(held, key=lambda tenant: (held[tenant] / weights[tenant], tenant))
            running = [seq for seq in running if seq.tenant == greedy]
        return max(running, key=lambda seq: seq.rank)

    def _preempt(self, victims: list[_Sequence]) -> None:
        self._leave(victims)
        for seq in victims:
            seq.kv_len = 0
        self._waiting = sorted([*self._waiting, *victims], key=lambda seq: seq.rank)
        self._stats.num_preemptions += len(victims)

    def _leave(self, leaving: list[_Sequence]) -> None:
        """Empties the slots of sequences; their full blocks stay findable."""
        if not leaving:
            return
        self._note(self._programs.drop([_slot(seq) for seq in leaving]))
        for seq in leaving:
            del self._running[_slot(seq)]
            seq.slot = None

    def _finish(
        self, seq: _Sequence, reason: FinishReason, error: Exception | None = None
    ) -> Event:
        seq.output.finish_reason, seq.output.error = reason, error
        self._stats.num_finished += seq.handle.done
        return Event(seq.handle, seq.output.sample_index, finish_reason=reason, error=error)

    def _sequences(self) -> list[_Sequence]:
        return [*self._waiting, *self._running.values()]


def _checked(config: CacheConfig, shapes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    for rows, chunk in shapes:
        if not 1 <= rows <= config.max_seqs or chunk < 1:
            raise ValueError(
                f"prefill_shapes: expected 1 to {config.max_seqs} rows of at least one token, got {(rows, chunk)}"
            )
    if not shapes:
        raise ValueError("prefill_shapes: expected at least one, got none")
    return tuple(shapes)


def _slot(seq: _Sequence) -> Any:
    assert seq.slot is not None
    return seq.slot
