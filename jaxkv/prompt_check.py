"""What a prompt must be before anything is allocated for it, whoever brings it."""

from __future__ import annotations

from collections.abc import Sequence


def check_ids(name: str, ids: Sequence[int], num_ids: int) -> None:
    """Checks token ids against a vocabulary.

    Args:
      name: of the argument, for the message.
      ids: token ids.
      num_ids: size of the vocabulary.

    Raises:
      ValueError: an id outside [0, num_ids).
    """
    bad = [token for token in ids if not 0 <= token < num_ids]
    if bad:
        raise ValueError(f"{name}: expected token ids in [0, {num_ids}), got {bad[0]}")


def check_prompt(
    name: str, prompt: Sequence[int], new_tokens: int, num_ids: int, max_seq_len: int
) -> None:
    """Checks that a prompt and what follows it can be one sequence.

    Args:
      name: of the argument, for the message.
      prompt: token ids.
      new_tokens: at most so many follow.
      num_ids: size of the vocabulary.
      max_seq_len: tokens of a sequence in the cache, see `CacheConfig`.

    Raises:
      ValueError: no token, an id outside the vocabulary, more tokens than a sequence holds.
    """
    if len(prompt) == 0:
        raise ValueError(f"{name}: expected at least one token, got an empty prompt")
    check_ids(name, prompt, num_ids)
    if len(prompt) + new_tokens > max_seq_len:
        raise ValueError(
            f"{name}: expected prompt and new tokens within the {max_seq_len} tokens of a sequence, "
            f"got {len(prompt)} + {new_tokens}"
        )
