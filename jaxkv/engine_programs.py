"""The engine's compiled programs: which shapes there are, and one place that compiles and calls them.

Invariants:
  * The shapes follow from the sizes given at the start, so the number of compiles is known before the first request.
  * The state is donated to every call and replaced by what comes back.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxkv import engine_loop
from jaxkv.config import CacheConfig
from jaxkv.draft_model import DraftModel, Models
from jaxkv.engine_state import (
    NO_TOKEN,
    EngineState,
    Placement,
    Report,
    init_engine_state,
    place,
)
from jaxkv.eviction import Policy
from jaxkv.mesh import device_config, init_on, mesh_of, specs_of, spmd
from jaxkv.model import DecoderModel
from jaxkv.namespace import NUM_WORDS
from jaxkv.sampling import SamplingParams

# What a call costs beside its tokens, in tokens: reading the weights.
CALL_OVERHEAD = 32


@dataclasses.dataclass(frozen=True)
class ProgramShapes:
    """The static sizes of the engine's programs.

    Attributes:
      prefill: (rows, tokens a row) of the prefill programs.
      decode_rows: rows of the decode programs, ascending; the last is max_seqs.
      max_steps: decode steps of one dispatch at most.
      draft_len: drafted tokens of one step.
      max_stop_ids: end tokens of one request at most.
    """

    prefill: tuple[tuple[int, int], ...]
    decode_rows: tuple[int, ...]
    max_steps: int
    draft_len: int
    max_stop_ids: int

    @property
    def num_programs(self) -> int:
        """Programs that `warm_up` compiles: the prefills, the decodes, place and drop."""
        return len(self.prefill) + len(self.decode_rows) + 2

    def choose_prefill(self, lefts: Sequence[int]) -> tuple[int, int]:
        """Returns the shape that computes most of `lefts` (tokens of each waiting row, in order) for its cost."""

        def value(shape: tuple[int, int]) -> float:
            rows, chunk = shape
            useful = sum(min(left, chunk) for left in lefts[:rows])
            return useful / (rows * chunk + CALL_OVERHEAD)

        return max(self.prefill, key=value)

    def choose_decode(self, num_rows: int) -> int:
        """Returns the fewest rows of a decode program that hold `num_rows`."""
        return next(rows for rows in self.decode_rows if rows >= num_rows)


def make_shapes(
    config: CacheConfig, prefill_tokens: int, max_steps: int, draft_len: int, max_stop_ids: int
) -> ProgramShapes:
    """Returns the shapes for a cache: long prompts alone, short ones together, decode in steps of four times the rows."""
    rows = sorted({min(config.max_seqs, n) for n in (1, 4, 16)})
    prefill = {(n, max(1, prefill_tokens // n)) for n in rows}
    prefill.add((1, max(1, prefill_tokens // 8)))
    decode_rows = [config.max_seqs]
    while decode_rows[0] > 4:
        decode_rows.insert(0, -(-decode_rows[0] // 4))
    return ProgramShapes(
        tuple(sorted(prefill)), tuple(decode_rows), max_steps, draft_len, max_stop_ids
    )


class Programs:
    """Compiles and calls the programs, and keeps the state they pass on.

    Attributes:
      models: whose weights the programs take.
      state: on the device.
      num_compiles, num_dispatches: so far.
      compile_s, device_s: seconds in compiles, and in calls until their report was there.
    """

    def __init__(
        self,
        model: DecoderModel,
        config: CacheConfig,
        policy: Policy,
        shapes: ProgramShapes,
        draft: DraftModel | None = None,
    ) -> None:
        self.models = Models(model, None if draft is None else draft.model)
        self._mesh = mesh_of(self.models)
        self.config, self.shapes = config, shapes
        self._device_config = mine = device_config(config, self._mesh)
        if draft is not None:
            draft = draft.on_device(self._mesh)
        self.state = init_on(
            self._mesh, lambda: init_engine_state(mine, policy, shapes.max_stop_ids, draft)
        )
        self.num_compiles = self.num_dispatches = 0
        self.compile_s = self.device_s = 0.0
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def place(self, new: Placement) -> None:
        """Runs `engine_state.place`."""
        self._dispatch(("place",), place, new)

    def feed(self, slots: Sequence[int], rows: int, chunk: int) -> Report:
        """Runs `engine_loop.feed` on the slots, padded to `rows`."""
        step = functools.partial(engine_loop.feed, self._device_config, chunk)
        return self._dispatch(("feed", rows, chunk), step, self._rows(slots, rows))

    def decode(self, slots: Sequence[int], num_steps: int) -> Report:
        """Runs `engine_loop.decode` on the slots."""
        return self._decode(slots, self.shapes.choose_decode(len(slots)), num_steps)

    def drop(self, slots: Sequence[int]) -> Report:
        """Runs `engine_loop.drop` on the slots."""
        mask = np.zeros(self.config.max_seqs, np.bool_)
        mask[list(slots)] = True
        return self._dispatch(
            ("drop",), functools.partial(engine_loop.drop, self._device_config), mask
        )

    def warm_up(self) -> int:
        """Compiles whatever is not compiled yet by running it on no rows; returns the number of programs."""
        for rows, chunk in self.shapes.prefill:
            self.feed([], rows, chunk)
        for rows in self.shapes.decode_rows:
            self._decode([], rows, 0)
        self.drop([])
        self.place(self._nobody())
        return self.num_compiles

    def _decode(self, slots: Sequence[int], rows: int, num_steps: int) -> Report:
        sizes = self.shapes.max_steps, self.shapes.draft_len
        step = functools.partial(engine_loop.decode, self._device_config, *sizes)
        args = self._rows(slots, rows), np.int32(num_steps)
        return self._dispatch(("decode", rows), step, *args)

    def _nobody(self) -> Placement:
        """Returns a request for the slot behind the last, where nothing is written."""
        sampling = dataclasses.asdict(SamplingParams())
        return placement(
            self.config,
            self.shapes,
            self.config.no_seq,
            tokens=(),
            num_prompt=0,
            max_len=0,
            stop_ids=(),
            namespace=np.zeros(NUM_WORDS),
            sample_index=0,
            **sampling,
        )

    def _rows(self, slots: Sequence[int], rows: int) -> np.ndarray:
        padding = [self.config.no_seq] * (rows - len(slots))
        return np.array([*slots, *padding], np.int32)

    def _dispatch(self, key: tuple[Any, ...], step: Callable[..., Any], *args: Any) -> Any:
        takes_model = key[0] in ("feed", "decode")
        leading: tuple[Any, ...] = (self.models, self.state) if takes_model else (self.state,)
        if key not in self._compiled:
            begin = time.perf_counter()
            out_specs = specs_of(self.state)
            if step is not place:
                out_specs = out_specs, PartitionSpec()
            step = spmd(step, self._mesh, (*leading, *args), out_specs)
            jitted = jax.jit(step, donate_argnums=len(leading) - 1)
            self._compiled[key] = jitted.lower(*leading, *args).compile()
            self.num_compiles += 1
            self.compile_s += time.perf_counter() - begin
        begin = time.perf_counter()
        out = self._compiled[key](*leading, *args)
        report = None
        if isinstance(out, EngineState):
            self.state = out
        else:
            self.state, report = out
            report = jax.device_get(report)
        self.device_s += time.perf_counter() - begin
        self.num_dispatches += 1
        return report


def placement(
    config: CacheConfig,
    shapes: ProgramShapes,
    slot: int,
    tokens: Sequence[int],
    num_prompt: int,
    max_len: int,
    stop_ids: Sequence[int],
    **others: Any,
) -> Placement:
    """Returns a `Placement` of NumPy arrays; `others` are its remaining fields, as numbers or arrays."""
    padded = np.zeros(config.max_seq_len, np.int32)
    padded[: len(tokens)] = tokens
    stops = np.full(shapes.max_stop_ids, NO_TOKEN, np.int32)
    stops[: len(stop_ids)] = stop_ids
    floats, words = ("temperature", "top_p", "min_p"), ("seed", "sample_index")
    fields = {"slot": slot, "tokens": padded, "num_tokens": len(tokens), "num_prompt": num_prompt}
    fields |= {"max_len": max_len, "stop_ids": stops} | others
    kinds = dict.fromkeys(floats, np.float32) | dict.fromkeys(words, np.uint32)
    return Placement(**{k: np.asarray(x, kinds.get(k, np.int32)) for k, x in fields.items()})
