"""The paged attention op and its dispatch over implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.layout import Array, BatchView, KVStore
from pallas_kernels.paged_attention.hopper import paged_attention_hopper
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.spec import check_inputs
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.sealed import SealedStore

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "tpu": paged_attention_tpu,
    "hopper": paged_attention_hopper,
    "triton": paged_attention_triton,
    "xla": paged_attention_xla,
    "reference": paged_attention_reference,
}


def paged_attention(
    q: Array,
    store: KVStore | SealedStore,
    layer: Array | int,
    view: BatchView,
    *,
    scale: Array | float,
    soft_cap: Array | float | None = None,
    window: Array | int | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Causal attention of new tokens over everything their sequence holds, read through block tables.

    REQUIRES: the K and V of the new tokens are already in the store (`write_kv`).

    Args:
      q: float[row, q_pos, q_head, head_dim].  q_pos 1 is decode; more is chunked prefill or verification.
      store: the pool; of a `SealedStore` a query sees the blocks before its own (spec.py).
      layer: i32[], which layer of the pool to read; may be traced.
      view: tables, lengths and positions of the rows.
      scale: multiplies q . k; may be traced.
      soft_cap: positive; scores become soft_cap * tanh(score / soft_cap).  None switches it off.
      window: a query sees the last `window` keys, itself included (Hugging Face's meaning); >= 1; may be
        traced.  None means all.
      implementation: "tpu" (Mosaic), "triton" (CUDA, sm_80 and later), "hopper" (CUDA, sm_90), "xla" (anywhere; one row
        after another, which is right for a CPU), "reference"; or "auto": tpu, triton or xla, by the platform the program is lowered for.
      return_lse: also return the log-sum-exp of the scores, for merging partial attention.

    Returns:
      out q.dtype[row, q_pos, q_head, head_dim]; zeros for padding queries and empty rows.
      With return_lse also lse f32[row, q_pos, q_head]; -inf where nothing is seen.

    Raises:
      ValueError: shapes, dtypes or names that do not fit; the message names the value and what was expected.
      NotImplementedError: the named implementation, or the platform's own, does not support the call.

    References:
      Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023,
      section 4.1; Dao et al., "FlashAttention", 2022, section 3.1 (the running softmax of the xla path).
    """
    dispatch.check_name(implementation, IMPLEMENTATIONS)
    check_inputs(q, store, view, soft_cap, window)

    def with_options(run: Callable[..., Any]) -> Callable[..., Any]:
        """Gives every implementation the same positional operands; None stays static."""

        def call(q: Array, store: Any, layer: Array, view: BatchView, options: Any) -> Any:
            return run(q, store, layer, view, **options)

        return call

    options = {"scale": scale, "soft_cap": soft_cap, "window": window}
    out, lse = dispatch.run(
        implementation,
        {name: with_options(run) for name, run in IMPLEMENTATIONS.items()},
        {"tpu": "tpu", "cuda": "triton"},
        "xla",
        *(q, store, jnp.asarray(layer, jnp.int32), view, options),
    )
    return (out, lse) if return_lse else out
