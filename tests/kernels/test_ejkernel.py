"""Agreement with the paged attention of ejkernel in plain XLA, where somebody has installed that package.

What it does otherwise than ours: one query a row; K and V apart, [block, kv_head, slot, head_dim]; scores are masked but
V is not, and every entry of the table is read, so dead slots must be finite here and unused entries in range.

References:
  https://github.com/erfanzar/ejkernel, ejkernel/kernels/_xla/page_attention.  Versions since 0.0.16 take the first two
  axes of K and V in either order and go by which of them divides the q heads; 0.0.16 itself takes this order only.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from oracles.attention import TOLERANCES, worst_row_error

from pallas_kernels.layout import decode
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import find, make_inputs
from pallas_kernels.paged_attention.triton import paged_attention_triton

theirs = pytest.importorskip(
    "ejkernel.kernels._xla.page_attention",
    reason="compares with ejkernel's page attention: pip install ejkernel",
)


@pytest.mark.parametrize("name", ["decode_group_7", "decode_hd80", "decode_many_blocks"])
def test_plain_decode_equals_ejkernel(name: str) -> None:
    case = find(name)
    inputs = make_inputs(case, dead=(0.0,), sentinel=0)
    args = (inputs.q, inputs.store, inputs.layer, inputs.view)
    kv = decode(inputs.store.layout, inputs.store.kv)[case.layer]
    assert case.num_q_heads % kv.shape[0], "the order of the axes is ambiguous"
    expected = theirs.page_attention(
        inputs.q[:, 0],
        *jnp.split(kv, 2, axis=-1),
        inputs.view.kv_lens,
        inputs.view.block_tables,
        attn_scale=case.softmax_scale,
    )
    knobs = {"scale": case.softmax_scale, "soft_cap": None, "window": None}
    out, _ = paged_attention_triton(*args, **knobs, interpret=True)
    assert worst_row_error(out[:, 0], expected) <= TOLERANCES["float32"]
    out = paged_attention(*args, scale=case.softmax_scale, implementation="xla")
    assert worst_row_error(out[:, 0], expected) <= TOLERANCES["float32"]
