"""Beam search for a fixed set of prompts: the host's side of `beam_loop`.

Invariants:
  * Everything is checked before a byte is allocated.
  * A prompt's beams share its blocks, prefilled once; the hypotheses of a prompt do not depend on the other prompts.
  * The host looks once per dispatch of `steps_per_dispatch` steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import beam_loop, decode_loop
from jaxkv.beam_loop import BeamState, EarlyStopping
from jaxkv.cache import raise_for_status
from jaxkv.config import CacheConfig
from jaxkv.copy_on_write import copied_bytes
from jaxkv.generate import Completion, Generator, RunStats
from jaxkv.model import DecoderModel
from jaxkv.sampling import SamplingParams, sampling_state
from jaxkv.status import StatusBit


@dataclasses.dataclass(frozen=True)
class Hypothesis(Completion):
    """One of the best continuations of a prompt.

    `sample_index` is its rank, 0 for the best; `finish_reason` "out_of_blocks" marks a beam that was still growing when
    the pool ran out.

    Attributes:
      score: sum of the tokens' log-probabilities over the number of tokens ** length_penalty.
    """

    score: float


@dataclasses.dataclass(frozen=True)
class BeamResult:
    """What a search found and what its copies cost.

    Attributes:
      hypotheses: the best of each prompt, best first; fewer than asked for where the search found fewer.
      num_steps: tokens chosen for every beam.
      copied_blocks: blocks that copy-on-write copied; never more than num_beams - 1 a prompt and step.
      copied_bytes: bytes of K and V in them, all layers.
    """

    hypotheses: list[list[Hypothesis]]
    num_steps: int
    copied_blocks: int
    copied_bytes: int


class BeamSearcher(Generator):
    """Compiled beam search for one model and one cache config; see `Generator` for the arguments.

    max_seqs is the number of beams that run at once, those of all prompts together.
    """

    def search(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_beams: int,
        max_new_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        num_return: int = 1,
    ) -> BeamResult:
        """Searches for all prompts at once; see `beam_search`."""
        self._check_search(num_beams, length_penalty, early_stopping, num_return)
        self._check(prompts, max_new_tokens, [SamplingParams()] * len(prompts), num_beams)
        self.stats = RunStats(
            prompt_tokens=sum(map(len, prompts)), num_blocks=self.config.num_blocks
        )
        rows = self.config.max_seqs
        sampling = sampling_state([SamplingParams()] * rows, [0] * rows)
        run = self._init(sampling, [max_new_tokens] * rows, max_new_tokens)
        run = self._prefill(run, prompts, num_beams)
        state = beam_loop.init_beams(run, len(prompts), num_beams, length_penalty, early_stopping)
        state = self._timed("decode_s", beam_loop.start, state)
        while not self._is_over(state):
            count = jnp.int32(self.steps_per_dispatch)
            state = self._timed("decode_s", beam_loop.steps, state, count)
        return self._result(state, num_return)

    def _check_search(
        self, num_beams: int, length_penalty: float, early_stopping: EarlyStopping, num_return: int
    ) -> None:
        if num_beams < 1:
            raise ValueError(f"num_beams: expected at least 1, got {num_beams}")
        if not 1 <= num_return <= num_beams:
            raise ValueError(
                f"num_return: expected 1 to the {num_beams} of num_beams, got {num_return}"
            )
        if not math.isfinite(length_penalty):
            raise ValueError(f"length_penalty: expected a finite number, got {length_penalty}")
        if early_stopping not in (False, True, "never"):
            raise ValueError(
                f"early_stopping: expected False, True or 'never', got {early_stopping!r}"
            )

    def _is_over(self, state: BeamState) -> bool:
        """Looks at a search between two dispatches.

        Raises:
          FloatingPointError: the model's logits are not finite.
          TransitionError: a transition refused the loop's call.
        """
        active, steps, not_finite, bits = jax.device_get(
            (state.active, state.num_steps, state.run.not_finite, state.run.cache.status.bits)
        )
        self._look(state.run, int(steps) * len(active))
        if not_finite.any():
            prompt = int(np.flatnonzero(not_finite)[0]) // state.scores.shape[1]
            raise FloatingPointError(
                f"prompt {prompt}, token {steps}: the model's logits are not finite"
            )
        if bits & ~StatusBit.OUT_OF_BLOCKS:
            raise_for_status(state.run.cache)
        return bool(bits) or not active.any()

    def _result(self, state: BeamState, num_return: int) -> BeamResult:
        active, steps, copies, done, scores, tokens, growing = jax.device_get(
            (
                state.active,
                state.num_steps,
                state.num_copies,
                state.finished_scores,
                state.scores / jnp.float32(max(1, int(state.num_steps))) ** state.length_penalty,
                state.finished_tokens,
                state.tokens,
            )
        )
        hypotheses = []
        for prompt in range(len(active)):
            found = [*zip(done[prompt], tokens[prompt], [False] * len(tokens[prompt]), strict=True)]
            if active[prompt]:
                cut = [True] * len(growing[prompt])
                found += zip(scores[prompt], growing[prompt], cut, strict=True)
            found = sorted((x for x in found if x[0] > -np.inf), key=lambda x: -x[0])[:num_return]
            hypotheses.append(
                [self._hypothesis(prompt, rank, *entry) for rank, entry in enumerate(found)]
            )
        pool, open_blocks = (int(n) for n in copies)
        return BeamResult(
            hypotheses=hypotheses,
            num_steps=int(steps),
            copied_blocks=open_blocks if self.config.is_quantised else pool,
            copied_bytes=copied_bytes(self.config, (pool, open_blocks)),
        )

    def _hypothesis(
        self, prompt: int, rank: int, score: np.floating, buffer: np.ndarray, is_cut: bool
    ) -> Hypothesis:
        tokens = buffer[buffer != decode_loop.NO_TOKEN].tolist()
        ended = tokens[-1] in self.eos_token_ids
        reason = "out_of_blocks" if is_cut else "stop" if ended else "length"
        return Hypothesis(prompt, rank, tokens, reason, float(score))


def beam_search(
    model: DecoderModel,
    config: CacheConfig,
    prompts: Sequence[Sequence[int]],
    *,
    num_beams: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return: int = 1,
    prefill_chunk: int = 64,
    steps_per_dispatch: int = 16,
) -> BeamResult:
    """Finds likely continuations of prompts by beam search, on the device.

    The results are those of transformers' ``generate(num_beams=..., do_sample=False)`` up to rounding.

    Args:
      model: any `DecoderModel`.
      config: the cache; max_seqs of at least len(prompts) * num_beams.
      prompts: token ids of each prompt, at least one each.
      num_beams: beams of each prompt; 1 is greedy.
      max_new_tokens: at least 1; the end token counts.
      eos_token_ids: ids that end a hypothesis.
      length_penalty: a hypothesis of n tokens is rated by its score / n ** length_penalty.
      early_stopping: when the search of a prompt ends, once num_beams hypotheses are finished. True: at once. False: when the
        best beam, if it ended now, would not be among them. "never": when the best beam can get no better than them
        at any length (log-probabilities are at most 0).
      num_return: hypotheses to return of each prompt, at most num_beams.
      prefill_chunk, steps_per_dispatch: see `Generator`.

    Returns:
      Hypotheses and costs. If the pool runs out of blocks, the hypotheses finished so far and the beams as they stood before
      the step that did not fit, those with `finish_reason` "out_of_blocks".

    Raises:
      ValueError, CapacityError, FloatingPointError: as `Generator.stream`.

    References:
      Kwon et al. 2023 section 4.4; transformers `GenerationMixin._beam_search`.
    """
    searcher = BeamSearcher(
        model,
        config,
        eos_token_ids=eos_token_ids,
        prefill_chunk=prefill_chunk,
        steps_per_dispatch=steps_per_dispatch,
    )
    return searcher.search(
        prompts,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_return=num_return,
    )
