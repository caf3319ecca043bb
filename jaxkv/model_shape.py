"""The numbers of a decoder that decide what its cache and its weights cost.

Invariants: a shape is immutable and valid once built by `model_shape` (from plain numbers) or by
`jaxkv.hf_config.model_shape_from_config`; nothing is guessed from a model's name.

References: field cases Q1 and Q2; transformers' modeling files of qwen2, qwen3, llama and mistral
(weight count).
"""

from dataclasses import dataclass, fields
from typing import Any

from jaxkv import format_bytes, ledger
from jaxkv.format_bytes import OWN_OPTIONS, KVOptions

COUNTED_TYPES = ("qwen2", "qwen3", "llama", "mistral")


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape. Build it with `model_shape` or `model_shape_from_config`, which validate.

    `hidden_size`, `intermediate_size` and `vocab_size` serve the weight count only and may be None.
    `sliding_layers` are the indices of the layers that attend to `sliding_window` keys. MLA models
    have both `kv_lora_rank` and `qk_rope_head_dim`.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    max_context_len: int | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    model_type: str | None = None

    @property
    def is_mla(self) -> bool:
        """Whether a token is cached as one latent for all heads."""
        return self.kv_lora_rank is not None

    @property
    def cached_heads(self) -> int:
        """Heads of a cached row: the kv heads, or 1 for MLA."""
        return 1 if self.is_mla else self.num_kv_heads

    @property
    def cached_width(self) -> int:
        """Values of one token and cached head: 2 * head_dim, or the latent and its rotary key for
        MLA.
        """
        if self.kv_lora_rank is not None:
            return self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        return 2 * self.head_dim

    def _check_layout(self, kv_format: str) -> None:
        """Raises: NotImplementedError for MLA latents in a quantised format."""
        if format_bytes.is_quantised(kv_format) and self.is_mla:
            raise NotImplementedError(
                f"kv_format: expected {', '.join(format_bytes.KV_FORMATS)} for MLA "
                f"(kv_lora_rank {self.kv_lora_rank}), got {kv_format!r}"
            )

    def bytes_per_token_per_layer(
        self,
        kv_format: str = "bfloat16",
        *,
        block_size: int | None = None,
        kv_options: KVOptions = OWN_OPTIONS,
    ) -> int:
        """Returns the KV bytes of one token in one layer; of a quantised cache, in a quantised layer.

        Quantised formats count codes and scales of a sealed block over its tokens, rounded up to
        whole bytes; `block_size` None means the format's own. Open blocks come on top.

        Raises: NotImplementedError for MLA in a quantised format; ValueError for options a format
        does not have.
        """
        self._check_layout(kv_format)
        format_bytes.num_wide(kv_format, self.num_layers, kv_options)
        if not format_bytes.is_quantised(kv_format):
            return ledger.values_bytes(self.cached_heads * self.cached_width, kv_format)
        return ledger.bytes_per_token_per_layer(
            self.num_kv_heads,
            self.head_dim,
            kv_format,
            block_size=block_size,
            symmetric_keys=kv_options.symmetric_keys,
            value_group=kv_options.value_group,
        )

    def bytes_per_token(
        self,
        kv_format: str = "bfloat16",
        *,
        block_size: int | None = None,
        kv_options: KVOptions = OWN_OPTIONS,
    ) -> int:
        """Returns the KV bytes of one token over all layers, without open blocks; wide layers count
        in the format of open blocks.
        """
        return self._all_layers_bytes([1] * self.num_layers, kv_format, block_size, kv_options)

    def open_block_bytes(
        self,
        kv_format: str = "bfloat16",
        *,
        block_size: int | None = None,
        kv_options: KVOptions = OWN_OPTIONS,
    ) -> int:
        """Returns the bytes of a sequence's full-precision open block over all quantised layers.

        It has one in quantised formats; 0 for formats without scales.
        """
        self._check_layout(kv_format)
        layers = self.num_layers - format_bytes.num_wide(kv_format, self.num_layers, kv_options)
        return layers * format_bytes.open_block_bytes(
            self.num_kv_heads, self.head_dim, kv_format, block_size
        )

    def sequence_bytes(
        self,
        num_tokens: int,
        kv_format: str = "bfloat16",
        *,
        block_size: int | None = None,
        kv_options: KVOptions = OWN_OPTIONS,
    ) -> int:
        """Returns the KV bytes of `num_tokens` tokens, every layer holding all of them (as the
        cache does); without rounding to blocks and without the open block.
        """
        per_token = self.bytes_per_token(kv_format, block_size=block_size, kv_options=kv_options)
        return ledger.sequence_bytes(num_tokens, per_token)

    def reachable_bytes(
        self,
        num_tokens: int,
        kv_format: str = "bfloat16",
        *,
        block_size: int | None = None,
        kv_options: KVOptions = OWN_OPTIONS,
    ) -> int:
        """Returns the KV bytes the next token can still attend to: sliding layers reach their
        window only.
        """
        window = num_tokens if self.sliding_window is None else self.sliding_window
        sliding = set(self.sliding_layers)
        reached = [
            min(num_tokens, window) if layer in sliding else num_tokens
            for layer in range(self.num_layers)
        ]
        return self._all_layers_bytes(reached, kv_format, block_size, kv_options)

    def _all_layers_bytes(
        self, tokens: list[int], kv_format: str, block_size: int | None, kv_options: KVOptions
    ) -> int:
        """Returns the KV bytes of that many tokens in each layer."""
        sealed = self.bytes_per_token_per_layer(
            kv_format, block_size=block_size, kv_options=kv_options
        )
        ends = kv_options.num_wide_layers
        if not ends:
            return sum(tokens) * sealed
        wide = self.bytes_per_token_per_layer(format_bytes.OPEN_FORMAT)
        return sum(tokens[ends:-ends]) * sealed + sum(tokens[:ends] + tokens[-ends:]) * wide


# Validation ---------------------------------------------------------------------------------------


def _count_problems(shape: ModelShape) -> list[str]:
    problems = []
    required = {"num_layers", "num_q_heads", "num_kv_heads", "head_dim"}
    optional = {"hidden_size", "intermediate_size", "vocab_size", "max_context_len"}
    optional |= {"sliding_window", "kv_lora_rank", "qk_rope_head_dim"}
    for name in [f.name for f in fields(shape) if f.name in required | optional]:
        value = getattr(shape, name)
        if value is None and name in optional:
            continue
        try:
            ledger.check_count(name, value, 1)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _relation_problems(shape: ModelShape) -> list[str]:
    problems = []
    if shape.num_q_heads % shape.num_kv_heads:
        problems.append(
            f"num_kv_heads: expected a divisor of {shape.num_q_heads} query heads, "
            f"got {shape.num_kv_heads}"
        )
    if (shape.kv_lora_rank is None) != (shape.qk_rope_head_dim is None):
        problems.append("kv_lora_rank, qk_rope_head_dim: expected both (MLA) or neither, got one")
    if any(not 0 <= layer < shape.num_layers for layer in shape.sliding_layers):
        problems.append(
            f"sliding_layers: expected indices below {shape.num_layers}, got {shape.sliding_layers}"
        )
    if shape.sliding_layers and shape.sliding_window is None:
        problems.append("sliding_window: expected a window for sliding_layers, got None")
    return problems


def model_shape(
    num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int, **options: Any
) -> ModelShape:
    """Returns a validated `ModelShape` from plain numbers; `options` are its other fields.

    Raises: ValueError with every field that is wrong, its value and what was expected; TypeError
    for an unknown field.
    """
    shape = ModelShape(num_layers, num_q_heads, num_kv_heads, head_dim, **options)
    problems = _count_problems(shape) or _relation_problems(shape)
    if problems:
        raise ValueError("; ".join(problems))
    return shape


# Weights ------------------------------------------------------------------------------------------


def _check_countable(shape: ModelShape) -> None:
    """Raises: NotImplementedError naming the field that puts the weight count out of reach."""
    if shape.num_experts:
        raise NotImplementedError(
            f"num_experts: weights are counted for dense models only, got {shape.num_experts}; "
            "give the weights' bytes"
        )
    if shape.is_mla:
        raise NotImplementedError(
            "kv_lora_rank: weights of MLA models are not counted; give the weights' bytes"
        )
    if shape.model_type is not None and shape.model_type not in COUNTED_TYPES:
        raise NotImplementedError(
            f"model_type: expected one of {', '.join(COUNTED_TYPES)} to count weights, "
            f"got {shape.model_type!r}; give the weights' bytes"
        )
    missing = [
        n for n in ("hidden_size", "intermediate_size", "vocab_size") if not getattr(shape, n)
    ]
    if missing:
        raise NotImplementedError(
            f"{', '.join(missing)}: needed to count weights; give the weights' bytes"
        )


def num_params(shape: ModelShape) -> int:
    """Returns the number of weights, exact for the Qwen2, Qwen3, Llama and Mistral layouts; a tied
    head is not counted twice.

    Raises: NotImplementedError naming the field, for mixtures of experts, MLA, other layouts, or
    missing sizes.
    """
    _check_countable(shape)
    hidden, inner, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    assert hidden is not None
    assert inner is not None
    assert vocab is not None
    q_width, kv_width = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * hidden * q_width + 2 * hidden * kv_width
    attention += shape.qkv_bias * (q_width + 2 * kv_width) + shape.o_bias * hidden
    attention += shape.qk_norm * 2 * shape.head_dim
    mlp = 3 * hidden * inner + shape.mlp_bias * (2 * inner + hidden)
    embeddings = vocab * hidden * (1 if shape.tied_embeddings else 2)
    return embeddings + shape.num_layers * (attention + mlp + 2 * hidden) + hidden


def weights_bytes(shape: ModelShape, weights_format: str = "bfloat16") -> int:
    """Returns the bytes of the weights when all are stored in `weights_format`.

    Raises: as `num_params`.
    """
    return ledger.values_bytes(num_params(shape), weights_format)
