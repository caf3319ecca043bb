"""The tables that `jaxkv generate --stats` and `jaxkv profile` show: what a run cost, where the bytes are.

Invariants: bytes are those of the cache's own layout or arrays; a row that says nothing for a format is left out.
"""

from __future__ import annotations

from rich.table import Table

from jaxkv.cli_terminal import format_bytes, format_percent, two_columns
from jaxkv.config import CacheConfig
from jaxkv.generate import Generator
from jaxkv.mesh import HEADS, ROWS
from jaxkv.profile import MemoryProfile
from pallas_kernels.sealed import QuantisedLayout


def open_bytes(config: CacheConfig) -> int:
    """Returns the bytes of the full-precision open blocks; 0 for formats without scales."""
    layout = config.layout
    return layout.open.nbytes if isinstance(layout, QuantisedLayout) else 0


def stats_table(generator: Generator, platform: str) -> Table:
    """Returns what the last run cost."""
    stats, config, mesh = generator.stats, generator.config, generator.mesh
    prefill = stats.prompt_tokens / stats.prefill_s if stats.prefill_s > 0 else 0.0
    peak = format_percent(stats.peak_blocks / stats.num_blocks)
    kv = format_bytes(config.layout.nbytes)
    if open_bytes(config):
        kv += f", of it open blocks {format_bytes(open_bytes(config))}"
    rows = [
        ("new tokens", f"{stats.new_tokens:,} at {stats.tokens_per_s:,.1f} tokens/s"),
        ("prompt tokens", f"{stats.prompt_tokens:,} at {prefill:,.1f} tokens/s"),
        ("compile time", f"{stats.compile_s:.2f} s"),
        ("dispatches", f"{stats.dispatches:,}"),
        ("blocks, peak", f"{stats.peak_blocks:,} of {stats.num_blocks:,} ({peak})"),
        ("blocks used after the run", f"{stats.used_blocks:,}"),
        ("KV bytes", kv),
        ("fragmentation, peak", format_percent(stats.peak_fragmentation)),
    ]
    if mesh is not None:
        parts = f"K/V heads in {mesh.shape[HEADS]}, rows in {mesh.shape[ROWS]}"
        rows.append(("devices", f"{mesh.size}: {parts}"))
    title = f"jaxkv on {platform}, {config.format}, blocks of {config.block_size} tokens"
    return two_columns(title, rows)


def profile_table(profile: MemoryProfile, title: str) -> Table:
    """Returns a memory profile for people."""
    used = format_percent(profile.utilisation)
    rows = [
        ("weights", "-" if profile.weights_bytes is None else format_bytes(profile.weights_bytes)),
        ("KV total", format_bytes(profile.kv_total_bytes)),
        ("KV used", f"{format_bytes(profile.kv_used_bytes)} ({used})"),
        (
            "KV peak used",
            f"{format_bytes(profile.kv_peak_bytes)} ({format_percent(profile.peak_utilisation)})",
        ),
        ("saved by sharing", format_bytes(profile.shared_saved_bytes)),
        ("bookkeeping", format_bytes(profile.bookkeeping_bytes)),
        ("sequences", f"{profile.num_seqs:,} with {profile.num_tokens:,} tokens"),
        (
            "blocks",
            f"{profile.used_blocks:,} of {profile.num_blocks:,}, {profile.block_size} tokens each",
        ),
        ("fragmentation", format_percent(profile.fragmentation)),
    ]
    if profile.kv_padded_bytes is not None:
        rows.insert(2, ("KV total with padding", format_bytes(profile.kv_padded_bytes)))
    if profile.kv_open_bytes:
        rows.insert(2, ("of it open blocks", format_bytes(profile.kv_open_bytes)))
    return two_columns(title, rows)
