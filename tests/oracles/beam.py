"""Beam search on plain lists, one hypothesis after the other, in float64; and the best continuations of all there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

Logits = Callable[[Sequence[int]], np.ndarray]
Scored = tuple[float, list[int]]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns f64[vocab]."""
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())


def beam_search(
    next_logits: Logits,
    prompt: Sequence[int],
    num_beams: int,
    max_new: int,
    eos: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> tuple[list[Scored], list[list[int]]]:
    """Returns the finished hypotheses (rating, tokens), best first, and the parents of the beams after every step."""
    running: list[Scored] = [(0.0, [])]
    finished: list[Scored] = []
    history = []
    for length in range(1, max_new + 1):
        found = []
        for beam, (score, tokens) in enumerate(running):
            for token, logp in enumerate(log_softmax(next_logits([*prompt, *tokens]))):
                found.append((score + float(logp), beam, token))
        found = [x for x in sorted(found, key=lambda x: -x[0]) if x[0] > -np.inf]
        found = found[: max(2, 1 + len(eos)) * num_beams]
        closed = early_stopping is True and len(finished) == num_beams
        next_beams, parents = [], []
        for rank, (score, beam, token) in enumerate(found):
            tokens = [*running[beam][1], token]
            if token in eos or length == max_new:
                if rank < num_beams and not closed:
                    finished.append((score / length**length_penalty, tokens))
            elif len(next_beams) < num_beams:
                next_beams.append((score, tokens))
                parents.append(beam)
        finished = sorted(finished, key=lambda x: -x[0])[:num_beams]
        running = next_beams
        if not running:
            break
        horizon = max_new if early_stopping == "never" and length_penalty > 0 else length
        reachable = running[0][0] / horizon**length_penalty
        full = len(finished) == num_beams
        if full and (early_stopping is True or reachable <= finished[-1][0]):
            break
        history.append(parents)
    return finished, history


def expected_copies(prompt_len: int, block_size: int, history: list[list[int]]) -> int:
    """Returns how many blocks copy-on-write has to copy: all but one of the siblings that write into an open block."""
    copies = 0
    for step, parents in enumerate(history):
        if (prompt_len + step) % block_size:
            copies += len(parents) - len(set(parents))
    return copies


def best_of_all(
    next_logits: Logits, prompt: Sequence[int], vocab: int, length: int, count: int
) -> list[Scored]:
    """Returns the `count` likeliest continuations of a length, by trying all of them."""
    scored = []
    for tokens in itertools.product(range(vocab), repeat=length):
        context = [*prompt]
        score = 0.0
        for token in tokens:
            score += float(log_softmax(next_logits(context))[token])
            context.append(token)
        scored.append((score, list(tokens)))
    return sorted(scored, key=lambda x: -x[0])[:count]
