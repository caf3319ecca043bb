"""A smaller model that guesses what the target will say, its K and V under the target's own block ids.

The draft model has a store and nothing else: block b of it holds the same tokens as block b of the target's.  So tables,
lengths, prefix hits, eviction, rollback and preemption are decided once and serve both.

Invariants:
  * Between two steps a token that the target's store holds is in the draft's store as well: whoever feeds the target feeds
    the draft.  Within a step the draft is fed the last known token and every one of its guesses, the last one included
    although nothing follows from it, so no row ever lags and what `register` makes findable serves both models.
  * A draft is a guess; whoever uses it checks every token.

References:
  Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Daliri et al., "Coupling without
  Communication and Drafter-Invariant Speculative Decoding", 2024 (draft and target that draw with the same Gumbel noise).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv.block_table import blocks_held
from jaxkv.cache import PagedKVCache
from jaxkv.config import CacheConfig
from jaxkv.decode_loop import vocab_size
from jaxkv.kv_store import Store, init_store
from jaxkv.mesh import device_heads
from jaxkv.model import DecoderModel
from jaxkv.sampling import SamplingState, sample
from pallas_kernels.layout import BatchView

Array = jax.Array


class Models(NamedTuple):
    """The weights that the engine's programs take: the model that answers, and the one that drafts for it."""

    target: DecoderModel
    draft: DecoderModel | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel:
    """A model with the target's vocabulary that drafts for it.

    Attributes:
      model: any `DecoderModel`.
      num_layers, num_kv_heads, head_dim: what a token takes in its cache.
    """

    model: DecoderModel
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def on_device(self, mesh: Mesh | None) -> DraftModel:
        """Returns the model as one device of the mesh holds it: with its share of the heads.

        Raises:
          ValueError: the heads do not divide.
        """
        return dataclasses.replace(self, num_kv_heads=device_heads(self.num_kv_heads, mesh))

    def cache_config(self, config: CacheConfig) -> CacheConfig:
        """Returns the target's cache with this model's K and V; its `layout.nbytes` is what the draft costs.

        Raises:
          ValueError: a size is out of range, or the target's format does not fit this model's layers and heads.
        """
        group = config.value_group
        try:
            return dataclasses.replace(
                config,
                num_layers=self.num_layers,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                value_group=None if group == config.head_dim else group,
            )
        except ValueError as error:
            raise ValueError(f"draft: its cache does not fit the target's; {error}") from error

    def check(self, config: CacheConfig, num_ids: int, draft_len: int) -> None:
        """Checks that the model can draft for a target.

        Args:
          config: the target's cache.
          num_ids: the target's vocabulary.
          draft_len: drafted tokens a step.

        Raises:
          ValueError: another vocabulary, no token to draft, or a cache that does not fit.
        """
        if draft_len < 1:
            raise ValueError(f"draft_len: expected at least 1 with a draft model, got {draft_len}")
        mine = vocab_size(self.cache_config(config), self.model)
        if mine != num_ids:
            raise ValueError(
                f"draft: expected the target's vocabulary of {num_ids} ids, got {mine}"
            )


def with_draft_store(
    config: CacheConfig, cache: PagedKVCache, draft: DraftModel | None
) -> PagedKVCache:
    """Returns an empty cache with room for the draft model's K and V; unchanged without one."""
    if draft is None:
        return cache
    return dataclasses.replace(cache, draft_store=init_store(draft.cache_config(config)))


def write_draft(
    model: DecoderModel, cache: PagedKVCache, tokens: Array, view: BatchView
) -> PagedKVCache:
    """Writes the draft model's K and V of new tokens (i32[row, q_pos]) that nobody asks it to continue."""
    assert cache.draft_store is not None
    return dataclasses.replace(cache, draft_store=model(tokens, cache.draft_store, view)[1])


def propose(
    config: CacheConfig,
    model: DecoderModel,
    cache: PagedKVCache,
    view: BatchView,
    sampling: SamplingState,
    last: Array,
    index: Array,
) -> tuple[PagedKVCache, Array]:
    """Lets the draft model go on from each row's last token, one token after the other.

    It draws with the row's own key, as the target will: with the same noise on both, two models that think alike choose
    alike, also where they sample; greedy guesses would hit only as often as the target draws the likeliest token.

    Args:
      config: the target's cache.
      model: the draft model.
      cache: the cache, its draft store at least as far as the target's.
      view: of a `reserve` for the last token of each row and its drafts: q_lens are 0, or 1 + the number of drafts.
      sampling: of the rows.
      last: i32[row], the last known token.
      index: i32[row], how many tokens the row has generated.

    Returns:
      The cache, whose draft store holds all tokens of the view, and the drafts i32[row, query_len - 1]; beyond a row's
      number they are rubbish within the vocabulary.
    """
    width = view.query_len

    def step(i: Array, carry: tuple[Array, Array, Store]) -> tuple[Array, Array, Store]:
        token, drafts, store = carry
        hidden, store = model(token[:, None], store, _token_of(config, view, i))

        def choose(hidden: Array) -> Array:
            return sample(sampling, model.unembed(hidden), index + i)

        token = jax.lax.cond(i < width - 1, choose, lambda _: token, hidden[:, 0])
        return token, drafts.at[:, i].set(token, mode="drop"), store

    assert cache.draft_store is not None
    drafts = jnp.zeros((len(last), width - 1), jnp.int32)
    carry = (last, drafts, cache.draft_store)
    _, drafts, store = jax.lax.fori_loop(0, width, step, carry)
    return dataclasses.replace(cache, draft_store=store), drafts


def _token_of(config: CacheConfig, view: BatchView, i: Array) -> BatchView:
    """Returns the view of token i of a view's new tokens, as if those after it were not reserved yet."""
    fed = view.q_lens > i
    kv_lens = jnp.minimum(view.kv_lens - view.q_lens + i + 1, view.kv_lens)
    column = jnp.arange(view.block_tables.shape[1], dtype=jnp.int32)[None, :]
    held = column < blocks_held(config, kv_lens)[:, None]
    open_ids = view.open_ids
    return BatchView(
        block_tables=jnp.where(held, view.block_tables, config.no_block),
        kv_lens=kv_lens,
        q_lens=fed.astype(jnp.int32),
        positions=jnp.where(fed, kv_lens - 1, 0)[:, None],
        open_ids=None if open_ids is None else jnp.where(fed, open_ids, config.max_seqs),
    )
