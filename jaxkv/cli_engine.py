"""An engine from the options of the command line: its cache, its policy, its draft model.

Invariants: models come from outside (`Loaded`), nothing here imports one; what the options alone can tell is checked when they
are built, before a model is loaded.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxkv import ledger
from jaxkv.cli_generate import Loaded, check_memory
from jaxkv.cli_terminal import spinner
from jaxkv.config import CacheConfig
from jaxkv.draft_model import DraftModel
from jaxkv.eviction import Policy, aged_lfu, cost_aware, fair, lfu, lru
from jaxkv.format_bytes import default_block_size
from jaxkv.mesh import mesh_of, num_row_shards

if TYPE_CHECKING:
    from jaxkv.engine import Engine

DEFAULT_MAX_LEN = 4096
POLICIES = ("lru", "lfu", "aged-lfu", "cost-aware", "fair")


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How the engine is built; None leaves the choice to the model.

    Attributes:
      max_seqs: sequences that run at once.
      max_len: tokens of a prompt with its answer; None: the model's context, at most 4096.
      kv_format, block_size, num_blocks: the pool; block_size None means the format's own, num_blocks None enough for
        max_seqs sequences of max_len.
      prefill_tokens: prompt tokens of one prefill dispatch.
      steps_per_dispatch: decode steps between two looks of the host: what streams arrives in bursts of so many tokens.
      draft_len: drafted tokens a step; 0: none.
      has_draft: whether a draft model drafts them.
      policy: one of `POLICIES`.
      tenant_weights: of the tenants 0, 1, ...; for `fair`, and for it alone.
      scrub_on_free: a freed block's bytes are zeroed before anyone else can get it.

    Raises:
      ValueError: a draft model with nothing to draft, no such policy, or weights that do not go with it.
    """

    max_seqs: int = 8
    max_len: int | None = None
    kv_format: str = "float32"
    block_size: int | None = None
    num_blocks: int | None = None
    prefill_tokens: int = 256
    steps_per_dispatch: int = 8
    draft_len: int = 0
    has_draft: bool = False
    policy: str = "lru"
    tenant_weights: tuple[int, ...] = ()
    scrub_on_free: bool = False

    def __post_init__(self) -> None:
        if self.has_draft and self.draft_len < 1:
            raise ValueError(
                f"draft_len: expected at least 1 with a draft model, got {self.draft_len}"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {self.policy!r}")
        if (self.policy == "fair") != bool(self.tenant_weights):
            given = ",".join(map(str, self.tenant_weights)) or "none"
            raise ValueError(
                f"tenant_weights: expected some with policy fair and none without, got {given} with {self.policy}"
            )

    def eviction(self, block_size: int) -> Policy:
        """Returns the policy for blocks of so many tokens.

        Raises:
          ValueError: a weight below 1.
        """
        if self.policy == "fair":
            return fair(self.tenant_weights)
        policies = {"lru": lru, "lfu": lfu, "aged-lfu": aged_lfu}
        return policies.get(self.policy) or cost_aware(full_cost=block_size)


def parse_weights(text: str | None) -> tuple[int, ...]:
    """Returns the weights in "3,1".

    Raises:
      ValueError: others than positive integers.
    """
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"tenant_weights: expected positive integers such as 3,1, got {text!r}")
    return tuple(map(int, parts))


def cache_config(loaded: Loaded, options: EngineOptions) -> tuple[CacheConfig, int]:
    """Returns the cache and the tokens a prompt with its answer may have.

    Raises:
      ValueError: a size out of range, beyond the model's context, or a pool larger than the machine's memory.
    """
    context = getattr(loaded.config, "max_position_embeddings", None)
    max_len = options.max_len
    if max_len is None:
        max_len = DEFAULT_MAX_LEN if context is None else min(context, DEFAULT_MAX_LEN)
    ledger.check_count("max_len", max_len, 2)
    if context is not None and max_len > context:
        raise ValueError(
            f"max_len: expected at most the model's {context} positions, got {max_len}"
        )
    size = options.block_size
    size = default_block_size(options.kv_format) if size is None else size
    ledger.check_count("block_size", size, 1)
    ledger.check_count("max_seqs", options.max_seqs, 1)
    per_seq = ledger.num_blocks_needed(max_len, size)
    config = CacheConfig(
        num_layers=loaded.config.num_layers,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        block_size=size,
        num_blocks=options.max_seqs * per_seq if options.num_blocks is None else options.num_blocks,
        max_seqs=options.max_seqs,
        max_blocks_per_seq=per_seq,
        format=options.kv_format,
        scrub_on_free=options.scrub_on_free,
    )
    check_memory(config, copies=num_row_shards(mesh_of(loaded.model)))
    return config, max_len


def draft_of(draft: Loaded, loaded: Loaded, config: CacheConfig, max_len: int) -> DraftModel:
    """Returns a loaded model as the draft of another.

    Raises:
      ValueError: its context is shorter than a sequence, its tokens are others, or the two pools together are larger
        than the machine's memory.
    """
    context = getattr(draft.config, "max_position_embeddings", None)
    if context is not None and context < max_len:
        raise ValueError(
            f"draft_model: expected a context of at least {max_len} positions, got {context}"
        )
    if loaded.tokenizer is not None and draft.tokenizer is not None:
        for token in range(0, loaded.config.vocab_size, -(-loaded.config.vocab_size // 64)):
            texts = [t.decode([token]) for t in (loaded.tokenizer, draft.tokenizer)]
            if texts[0] != texts[1]:
                raise ValueError(
                    f"draft_model: expected the tokens of the model, whose {token} is {texts[0]!r}, got {texts[1]!r}"
                )
    sizes = draft.config
    model = DraftModel(draft.model, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)
    copies = num_row_shards(mesh_of(loaded.model))
    check_memory(config, model.cache_config(config), copies=copies)
    return model


def build_engine(
    loaded: Loaded, config: CacheConfig, options: EngineOptions, draft: DraftModel | None = None
) -> Engine:
    """Returns an engine with every program compiled.

    Raises:
      ValueError: a size out of range, or a draft model that does not fit.
    """
    from jaxkv.engine import Engine

    engine = Engine(
        loaded.model,
        config,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        prefill_tokens=options.prefill_tokens,
        max_steps=options.steps_per_dispatch,
        draft_len=options.draft_len,
        draft=draft,
        policy=options.eviction(config.block_size),
    )
    with spinner("compiling"):
        engine.warm_up()
    return engine
