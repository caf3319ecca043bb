"""What a transition could not do: sticky bits set on the device, raised on the host.

Invariants:
  * A transition that sets a bit changes no other leaf of the cache.
  * Bits stay set until `clear_status`; the host looks at them where it fetches tokens anyway.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp

Array = jax.Array


class StatusBit(enum.IntFlag):
    """Reasons for which a transition changed nothing."""

    OUT_OF_BLOCKS = 1
    SEQ_TOO_LONG = 2
    INVALID_SEQ = 4
    DUPLICATE_SEQ = 8
    INVALID_Q_LEN = 16
    EMPTY_SLOT = 32
    DOUBLE_RELEASE = 64
    INVALID_KV_LEN = 128
    SEALED_BLOCK = 256
    SLOT_IN_USE = 512
    NOT_ADMITTED = 1024
    INVALID_TENANT = 2048


_EXPLANATIONS = {
    StatusBit.OUT_OF_BLOCKS: "the pool has fewer free blocks than the call needs",
    StatusBit.SEQ_TOO_LONG: "a sequence would need more than max_blocks_per_seq blocks",
    StatusBit.INVALID_SEQ: "a sequence id is negative or past max_seqs (max_seqs itself means padding)",
    StatusBit.DUPLICATE_SEQ: "the same slot appears twice in one call",
    StatusBit.INVALID_Q_LEN: "a q_len is negative or larger than query_len",
    StatusBit.EMPTY_SLOT: "a fork names a source slot that holds no sequence",
    StatusBit.DOUBLE_RELEASE: "a release names a slot that holds no sequence",
    StatusBit.SEALED_BLOCK: "a truncate would cut a sealed block of a quantised format in two; cut at a multiple of "
    "block_size and run the tokens after it again",
    StatusBit.INVALID_KV_LEN: "a truncate asks for more tokens than the sequence holds, or for fewer than none",
    StatusBit.SLOT_IN_USE: "an admit names a slot that holds a sequence",
    StatusBit.NOT_ADMITTED: "a register names a slot that was not started by admit, or that is empty",
    StatusBit.INVALID_TENANT: "a tenant is negative or has no weight in the fair policy",
}


class CapacityError(RuntimeError):
    """The cache has no room; `need`, `free` and `cached` count blocks (`need` and `free` slots, if the message says so)."""

    def __init__(self, message: str, need: int, free: int, cached: int = 0) -> None:
        super().__init__(message)
        self.need = need
        self.free = free
        self.cached = cached


class TransitionError(ValueError):
    """A transition was asked for something that does not exist; `bits` says what."""

    def __init__(self, bits: StatusBit) -> None:
        names = "|".join(bit.name or "" for bit in bits)
        reasons = "; ".join(_EXPLANATIONS[bit] for bit in bits)
        super().__init__(f"{names}: {reasons}. Nothing was changed.")
        self.bits = bits


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["bits", "need_blocks"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Status:
    """Sticky result of the transitions so far.

    Attributes:
      bits: i32[], union of `StatusBit`; 0 means everything worked.
      need_blocks: i32[], blocks that the last refused reserve asked for; 0 before any.
    """

    bits: Array
    need_blocks: Array


def ok_status() -> Status:
    """Returns the status of a cache in which nothing has failed."""
    return Status(bits=jnp.int32(0), need_blocks=jnp.int32(0))


def flag(bit: StatusBit, condition: Array) -> Array:
    """Returns i32[]: the bit where the condition (bool[]) holds, else 0."""
    return jnp.where(condition, jnp.int32(bit), jnp.int32(0))
