"""Field cases of the TPU attention kernel: rows made by hand, whose right answers are known without an oracle.

Every row of a call is one case.  Scale, soft cap and window are traced and all shapes are the same, so one compiled
program serves the whole file.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_copy.tpu import copy_blocks_tpu
from pallas_kernels.kv_write.tpu import write_kv_tpu
from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.paged_attention.tpu_plan import Tuning

Q_HEADS, KV_HEADS, HEAD_DIM = 28, 4, 64
ROWS, QUERIES, COLUMNS = 8, 2, 4
LAYOUT = KVLayout(1, 40, KV_HEADS, 8, HEAD_DIM, kv_format("float32"), False)
NO_CAP, NO_WINDOW = 1e9, 2**30
NARROW = Tuning(max_chunk_len=128, smem_table_bytes=0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row by hand.

    Attributes:
      k, v: f32[kv_len, kv_head, head_dim], or what broadcasts to it with its length.
      q: f32[q_pos, q_head, head_dim], or what broadcasts to it.
      q_len: queries; padding after them holds NaN.
    """

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    q_len: int = 1


def spelled(kv_len: int, q_len: int = 1) -> Row:
    """Returns a row whose scores are all zero and whose V spells the key: the output lists the keys seen."""
    zero = np.zeros((kv_len, 1, 1), np.float32)
    return Row(zero, np.eye(kv_len, HEAD_DIM, dtype=np.float32)[:, None], zero[:1], q_len)


def random(seed: int, kv_len: int) -> Row:
    """Returns a row of normal numbers."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, kv_len, KV_HEADS, HEAD_DIM), np.float32)
    return Row(k, v, rng.standard_normal((1, Q_HEADS, HEAD_DIM), np.float32))


@functools.partial(jax.jit, compiler_options=FAST_INTERPRET)
def program(q, store, view, scale, soft_cap, window):
    return paged_attention_tpu(
        q,
        store,
        jnp.int32(0),
        view,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        interpret=pltpu.InterpretParams(),
        tuning=NARROW,
    )


def attend(
    rows: list[Row],
    *,
    scale: float = 1.0,
    soft_cap: float = NO_CAP,
    window: int = NO_WINDOW,
    dead: tuple[float, float] = (math.nan, math.nan),
    filler: int = LAYOUT.no_block,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, lse) of up to ROWS rows.

    Args:
      rows: the rows; those missing up to ROWS have no tokens.
      scale, soft_cap, window: as in the op.
      dead: what K and what V hold wherever no row has a token.
      filler: unused table entries.
    """
    kv = np.empty(LAYOUT.shape, np.float32)
    kv[..., :HEAD_DIM], kv[..., HEAD_DIM:] = dead
    q = np.full((ROWS, QUERIES, Q_HEADS, HEAD_DIM), math.nan, np.float32)
    tables = np.full((ROWS, COLUMNS), filler, np.int32)
    kv_lens, q_lens = np.zeros((2, ROWS), np.int32)
    ids = iter(np.random.default_rng(7).permutation(LAYOUT.num_blocks).tolist())
    for r, row in enumerate(rows):
        kv_lens[r], q_lens[r] = len(row.k), row.q_len
        q[r, : row.q_len] = row.q
        for position in range(len(row.k)):
            column, slot = divmod(position, LAYOUT.block_size)
            if slot == 0:
                tables[r, column] = next(ids)
            kv[0, tables[r, column], :, slot, :HEAD_DIM] = row.k[position]
            kv[0, tables[r, column], :, slot, HEAD_DIM:] = row.v[position]
    positions = np.maximum((kv_lens - q_lens)[:, None] + np.arange(QUERIES, dtype=np.int32), 0)
    view = BatchView(*(jnp.asarray(x) for x in (tables, kv_lens, q_lens, positions)))
    store = KVStore(jnp.asarray(kv), LAYOUT)
    out, lse = program(
        jnp.asarray(q),
        store,
        view,
        jnp.float32(scale),
        jnp.float32(soft_cap),
        jnp.int32(window),
    )
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("window", [1, 4, 9, NO_WINDOW])
def test_query_sees_the_keys_of_its_window_up_to_its_own_position(window: int) -> None:
    """Field cases A6, A7, E5, E8, K1: window 4 at position 9 sees keys 6..9; all-zero keys count."""
    rows = [spelled(*lens) for lens in ((10, 1), (5, 2), (1, 1), (8, 1), (9, 2), (16, 2), (25, 1))]
    out, lse = attend(rows, window=window)
    for r, row in enumerate(rows):
        for j in range(row.q_len):
            position = len(row.k) - row.q_len + j
            key = np.arange(HEAD_DIM)
            seen = (key <= position) & (key > position - window)
            np.testing.assert_allclose(out[r, j], np.tile(seen / seen.sum(), (Q_HEADS, 1)), 1e-6)
            np.testing.assert_allclose(lse[r, j], math.log(seen.sum()), rtol=1e-6, atol=1e-6)
    assert not out[:, 1:][[0, 2, 3, 6, 7]].any()  # padding, its queries NaN


def test_q_head_reads_its_own_kv_head() -> None:
    """Field cases M1, M2: 28 heads over 4; head 27 reads kv head 3, and heads 0..6 read kv head 0."""
    heads = np.arange(KV_HEADS, dtype=np.float32)[None, :, None] * np.ones((9, 1, 1), np.float32)
    out, _ = attend([dataclasses.replace(spelled(9), v=heads)])
    np.testing.assert_allclose(out[0, 0, :, 5], np.arange(Q_HEADS) // 7, rtol=1e-6)


def test_soft_cap_comes_before_the_mask_and_is_applied() -> None:
    """Field cases M4, M6, M7: cap 1 on scores 0.3 and 2 weighs 0.33789 and 0.66211; caps differ."""
    k = np.zeros((2, 1, HEAD_DIM), np.float32)
    k[:, 0, 0] = 0.3, 2.0
    unit = np.eye(1, HEAD_DIM, dtype=np.float32)[None]
    row = dataclasses.replace(spelled(2), k=k, q=unit)
    out, _ = attend([row], soft_cap=1.0, dead=(5.0, 1.0))
    np.testing.assert_allclose(out[0, 0, 0, :3], [0.33789, 0.66211, 0], atol=1e-5)
    outs = [attend([random(0, 12)], scale=1 / 8, soft_cap=cap)[0][0] for cap in (1.0, 5.0, 50.0)]
    assert np.max(np.abs(outs[0] - outs[1])) > 1e-3
    assert np.max(np.abs(outs[1] - outs[2])) > 1e-4


def test_dead_k_dead_v_and_unused_columns_change_no_bit() -> None:
    """Field cases A8, E1, E2, E3, E10: NaN in K alone and in V alone; unused columns name a block in use."""
    rows = [random(1, 1), random(2, 3), random(3, 17), random(4, 24)]
    plain = attend(rows, dead=(0.0, 0.0))
    for change in (
        {"dead": (math.nan, 0.0)},
        {"dead": (0.0, math.nan)},
        {"dead": (math.inf, -math.inf)},
        {"filler": 0},
        {"filler": 2**31 - 1},
    ):
        got = attend(rows, **{"dead": (0.0, 0.0)} | change)
        assert [x.tobytes() for x in got] == [x.tobytes() for x in plain], change
    assert not plain[0][4:].any()  # rows without tokens, their queries NaN
    assert np.all(np.isneginf(plain[1][4:]))


def test_nan_in_a_seen_key_reaches_its_row_alone() -> None:
    """Field case O6: what a query sees and is not a number must not turn into zeros."""
    rows = [random(1, 6), random(2, 12), random(3, 9)]
    clean, _ = attend(rows)
    k = rows[1].k.copy()
    k[2] = math.nan
    out, lse = attend([rows[0], dataclasses.replace(rows[1], k=k), rows[2]])
    assert np.all(np.isnan(out[1, 0]))
    assert np.all(np.isnan(lse[1, 0]))
    assert out[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


def test_kernels_have_no_operand_they_never_read() -> None:
    """Field case R2: an unread operand has made libtpu hand zeros to a kernel's copies."""
    store = KVStore(jnp.zeros(LAYOUT.shape), LAYOUT)
    one, ids = jnp.int32(1), jnp.zeros(ROWS, jnp.int32)
    for query_len, table_bytes in ((1, 2**18), (QUERIES, 0)):
        tokens = jnp.zeros((ROWS, query_len, KV_HEADS, HEAD_DIM))
        q = jnp.zeros((ROWS, query_len, Q_HEADS, HEAD_DIM))
        view = BatchView(jnp.zeros((ROWS, COLUMNS), jnp.int32), ids, ids, ids[:, None])
        view = dataclasses.replace(view, positions=jnp.zeros((ROWS, query_len), jnp.int32))
        tuning = Tuning(smem_table_bytes=table_bytes)
        numbers = {"scale": 1.0, "soft_cap": None, "window": None, "tuning": tuning}
        attention = functools.partial(paged_attention_tpu, **numbers)
        for kernel, args in (
            (attention, (q, store, one, view)),
            (write_kv_tpu, (store, one, tokens, tokens, view)),
            (copy_blocks_tpu, (store, ids, ids, one)),
        ):
            jaxpr = jax.make_jaxpr(kernel)(*args).jaxpr
            [call] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
            body = call.params["jaxpr"]
            read = {var for eqn in body.eqns for var in eqn.invars if not hasattr(var, "val")}
            assert set(body.invars[: len(call.invars)]) <= read, kernel
