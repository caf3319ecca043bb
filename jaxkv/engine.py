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

from jaxkv import decode_loop
from jaxkv.config import CacheConfig
from jaxkv.draft_model import DraftModel
from jaxkv.engine_admission import Admission, Tokenizer
from jaxkv.engine_programs import Programs, make_shapes, placement
from jaxkv.engine_sequence import EngineSequence
from jaxkv.engine_state import Report
from jaxkv.engine_stats import EngineStats
from jaxkv.eviction import Fair, Policy, lru
from jaxkv.model import DecoderModel
from jaxkv.request import Event, FinishReason, Handle, Output, Request
from jaxkv.status import CapacityError, StatusBit, TransitionError
from jaxkv.stop_text import StopText


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
      draft_len: drafted tokens a step; 0 switches speculation off.
      draft: who drafts; None: the text itself (prompt lookup).
      max_stop_ids: end tokens of a request at most, the engine's among them.
      prefill_shapes: (rows, tokens a row) of the prefill programs; None: a few that make up `prefill_tokens`.

    Raises:
      ValueError: a size is out of range, or the draft model does not fit (see `DraftModel.check`).
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
        draft: DraftModel | None = None,
        max_stop_ids: int = 8,
        prefill_shapes: Sequence[tuple[int, int]] | None = None,
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
        num_ids = decode_loop.vocab_size(config, model)
        if draft is not None:
            draft.check(config, num_ids, draft_len)
        self.model, self.draft, self.config, self.tokenizer = model, draft, config, tokenizer
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.policy = policy
        self._admission = Admission(
            config, policy, tokenizer, num_ids, self.eos_token_ids, max_stop_ids
        )
        self.shapes = make_shapes(config, prefill_tokens, max_steps, draft_len, max_stop_ids)
        if prefill_shapes is not None:
            self.shapes = dataclasses.replace(self.shapes, prefill=_checked(config, prefill_shapes))
        self._programs = Programs(model, config, policy, self.shapes, draft)
        self._waiting: list[EngineSequence] = []
        self._running: dict[int, EngineSequence] = {}
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
        prompt = self._admission.encode(request)
        self._admission.check(request, prompt)
        number = self._stats.num_submitted
        outputs = [Output(i) for i in range(request.num_samples)]
        handle = Handle(number, request, prompt, outputs)
        for output in outputs:
            text = StopText(self.tokenizer.stream(), request.stop) if self.tokenizer else None
            rank = (-request.priority, number, output.sample_index)
            self._waiting.append(EngineSequence(handle, output, rank, text, num_tokens=len(prompt)))
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

    def _waits_for_sibling(self, seq: EngineSequence) -> bool:
        """Whether another sample of its request is computing the prompt that it will then find."""
        siblings = (s for s in self._running.values() if s.handle is seq.handle)
        return any(not sibling.started for sibling in siblings)

    def _place(self, seq: EngineSequence, slot: int) -> None:
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
                self._admission.stop_ids(request),
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
        report = self._programs.feed([seq.running_slot for seq in rows], num_rows, chunk)
        for seq in rows:
            slot = seq.running_slot
            found = int(report.num_found[slot])
            if seq.started:
                self._stats.resumed_tokens += found
            else:
                self._stats.found_tokens += found
            if seq.output.sample_index == 0 and not seq.started and seq.kv_len == 0:
                seq.handle.num_found = found
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
        report = self._programs.decode([seq.running_slot for seq in rows], steps)
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

    def _book(
        self, seq: EngineSequence, tokens: list[int], logprobs: list[float], code: int
    ) -> Event:
        """Appends new tokens to the output; ends it if the device ended the row or a stop string came."""
        (new, scores, text), reason = seq.append(tokens, logprobs, code)
        self._stats.new_tokens += len(new)
        if code:
            del self._running[seq.running_slot]
            seq.slot = None
        if reason is None:
            return Event(seq.handle, seq.output.sample_index, new, scores, text)
        error = None
        if reason is FinishReason.ERROR:
            where = f"request {seq.handle.id}, token {len(seq.output.tokens)}"
            error = FloatingPointError(f"{where}: the model's logits are not finite")
        event = self._finish(seq, reason, error)
        return dataclasses.replace(event, tokens=new, logprobs=scores, text=text)

    # Leaving --------------------------------------------------------------------------------------

    def _relieve(self, need: int) -> list[Event]:
        """Preempts the policy's victim; a sequence that is alone and still lacks blocks fails."""
        victim = self._victim()
        if len(self._running) > 1:
            self._preempt([victim])
            return []
        free, cached = self._stats.num_free, self._stats.num_cached
        self._leave([victim])
        message = f"out of blocks: the request needs {need} more, {free} are free and none of {cached} cached may be evicted"
        error = CapacityError(message, need, free, cached)
        return [self._finish(victim, FinishReason.ERROR, error)]

    def _victim(self) -> EngineSequence:
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

    def _preempt(self, victims: list[EngineSequence]) -> None:
        self._leave(victims)
        for seq in victims:
            seq.kv_len = 0
        self._waiting = sorted([*self._waiting, *victims], key=lambda seq: seq.rank)
        self._stats.num_preemptions += len(victims)

    def _leave(self, leaving: list[EngineSequence]) -> None:
        """Empties the slots of sequences; their full blocks stay findable."""
        if not leaving:
            return
        self._note(self._programs.drop([seq.running_slot for seq in leaving]))
        for seq in leaving:
            del self._running[seq.running_slot]
            seq.slot = None

    def _finish(
        self, seq: EngineSequence, reason: FinishReason, error: Exception | None = None
    ) -> Event:
        seq.output.finish_reason, seq.output.error = reason, error
        self._stats.num_finished += seq.handle.done
        return Event(seq.handle, seq.output.sample_index, finish_reason=reason, error=error)

    def _sequences(self) -> list[EngineSequence]:
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
