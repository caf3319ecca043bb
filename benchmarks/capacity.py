"""Tokens that a byte of cache holds, against bfloat16: every array of a real store counted.

Codes, scales and the open blocks of 64 slots, by `nbytes` of what `init_store` makes, 8,192 blocks. A token of capacity is a
slot of the pool's blocks: num_blocks * block_size; open blocks cost bytes and add none. Each line says the block size it
uses: the format's own unless the metric's name says otherwise. Nothing is timed and nothing allocated.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
from typing import Any

import harness
import jax

from jaxkv import CacheConfig
from jaxkv.format_bytes import default_block_size
from jaxkv.kv_store import init_store

NUM_BLOCKS, MAX_SEQS, NUM_LAYERS, NUM_KV_HEADS = 8_192, 64, 24, 8
HEAD_DIMS = (64, 128)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to store K and V.

    Attributes:
      name: what stands for the format in the metric's id.
      format: the format.
      least: tokens per byte it must reach against bfloat16; None where it is shown only.
      smallest: one V scale a token and head.
      options: fields of `CacheConfig`.
    """

    name: str
    format: str
    least: float | None = None
    smallest: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


VARIANTS = (
    Variant("int8", "int8", 1.85),
    Variant("fp8_e4m3", "fp8_e4m3", 1.85),
    Variant("int4", "int4", 3.3),
    Variant("int4_smallest", "int4", 3.5, smallest=True),
    Variant("int8_block32", "int8", options={"block_size": 32}),
    Variant("int8_symmetric", "int8", options={"symmetric_keys": True}),
)


def config_of(variant: Variant, head_dim: int) -> CacheConfig:
    """Returns the cache of a variant; each of its sequences may hold the whole pool."""
    options = {"block_size": default_block_size(variant.format), **variant.options}
    if variant.smallest:
        options["value_group"] = head_dim
    return CacheConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        num_blocks=NUM_BLOCKS,
        max_seqs=MAX_SEQS,
        max_blocks_per_seq=NUM_BLOCKS,
        format=variant.format,
        **options,
    )


def tokens_per_byte(config: CacheConfig) -> float:
    """Returns the slots of the pool over the bytes of all arrays of the store."""
    store = jax.eval_shape(lambda: init_store(config))
    return config.num_blocks * config.block_size / harness.tree_bytes(store)


def measure(variant: Variant, head_dim: int) -> harness.Result:
    """Returns one figure."""
    config = config_of(variant, head_dim)
    plain = tokens_per_byte(config_of(Variant("bfloat16", "bfloat16"), head_dim))
    own = tokens_per_byte(config)
    shapes = {name: getattr(config, name) for name in ("head_dim", "block_size", "value_group")}
    shapes |= {"symmetric_keys": config.symmetric_keys, "num_kv_heads": NUM_KV_HEADS}
    shapes |= {"num_blocks": NUM_BLOCKS, "max_seqs": MAX_SEQS}
    shapes |= {"num_layers": NUM_LAYERS, "bytes_per_token": round(1 / own, 1)}
    return harness.Result(
        f"capacity.{variant.name}.tokens_per_byte_vs_bf16",
        own / plain,
        "ratio",
        shapes,
        versus="bfloat16",
        versus_value=1.0,
        ratio=own / plain,
        least=variant.least,
    )


def run(quick: bool) -> list[harness.Result]:
    """Counts every variant at both widths; `quick` changes nothing."""
    return [measure(variant, head_dim) for variant in VARIANTS for head_dim in HEAD_DIMS]


if __name__ == "__main__":
    harness.main("Tokens per byte against a bfloat16 cache, all arrays counted", run)
