"""What jaxkv asks of a model: one small protocol."""

from __future__ import annotations

from typing import Protocol

import jax

from pallas_kernels.cached_attention import Store
from pallas_kernels.layout import BatchView

Array = jax.Array


class DecoderModel(Protocol):
    """A decoder that reads and writes its K/V through a store that somebody else owns.

    The object itself must be a pytree whose leaves are its weights, so that a jitted loop takes it as an
    argument (a Flax NNX module is one).
    """

    def __call__(self, tokens: Array, store: Store, view: BatchView) -> tuple[Array, Store]:
        """Runs the new tokens of each row through all layers.

        Args:
          tokens: i32[row, q_pos]; padding holds any valid id.
          store: the K/V of everything before; every layer writes the new tokens before it attends.
          view: tables, lengths and positions of the rows.

        Returns:
          hidden float[row, q_pos, hidden] after the last norm, and the store.
        """
        ...

    def unembed(self, hidden: Array) -> Array:
        """Returns logits f32[..., vocab] for hidden float[..., hidden]."""
        ...
