"""The decoder: one layer module, all layers stacked, one scan over them.

Invariants:
  * Every weight of a layer is stacked on a leading layer axis; the forward is one `lax.scan` over (layer weights,
    layer index, window) that carries the residual stream and whatever the attention keeps (here: the store).
  * The model produces q, k and v and consumes the attention's output; who keeps K and V, and how, is the business
    of `attend`.  `__call__` attends through the paged cache, `models.qwen.dense` without one.
  * Matrices are stored [in, out], the embedding and the head [vocab, hidden].
  * The stack has two homes for its matrices: one array for all layers, or (`Qwen.spread`) one array a layer.
    XLA:CPU copies a layer's slice out of a stack before it multiplies; a step of SmolLM2 then moves its weights
    three times (57.9 ms for the MLPs of 30 layers, 38.1 ms spread, 8 rows, same run).  Spread matrices are
    [out, in], and the left operand where rows are few (`_times`): 10.1 ms for 113 MB with 8 rows, the other way round
    15.8 ms; but 256 tokens of a prompt take 597 ms with the matrices left, 467 right.
  * Norms and rotation are float32, matmul results have the dtype of the weights, logits are float32.
  * On a mesh (`models.qwen.sharding`, which says what is divided and sent) the same code runs on every device.
  * The module is a pytree: pass it to `jax.jit` as an argument, so that weights are not constants of the program.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.qwen.config import QwenConfig
from models.qwen.rope import cos_sin, rotate
from pallas_kernels.cached_attention import Store, cached_attention, rows_to_read
from pallas_kernels.layout import BatchView

Array = jax.Array
SUMMED = "o_proj", "down_proj"  # matrices whose inputs are divided over the devices of a mesh
FEW_ROWS = 16  # of activations: up to here a product is bound by reading its matrix
Carry = TypeVar("Carry")
Window = Array | int | None
Attend = Callable[[Carry, Array, Array, Array, Array, Window], tuple[Array, Carry]]
Product = Callable[[str, Array], Array]
Exchange = Callable[[list[Array]], list[Array]]

NO_WINDOW = 2**30  # a window that no int32 position reaches past


def layer_shapes(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of one layer, by name; the layer axis is not in it."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q_proj": (hidden, q_width),
        "k_proj": (hidden, kv_width),
        "v_proj": (hidden, kv_width),
        "o_proj": (q_width, hidden),
        "mlp_norm": (hidden,),
        "gate_proj": (hidden, config.intermediate_size),
        "up_proj": (hidden, config.intermediate_size),
        "down_proj": (config.intermediate_size, hidden),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q_width,), "k_bias": (kv_width,), "v_bias": (kv_width,)}
    if config.o_bias:
        shapes["o_bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    return shapes


def top_shapes(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight outside the layers, by name; no "lm_head" where it is tied."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, config.hidden_size),
        "final_norm": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Returns x over its root mean square, times weight: x.dtype[..., n], computed in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * jax.lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """One decoder layer; holds the weights of `layer_shapes`, alone or stacked on a leading layer axis."""

    input_norm: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param
    mlp_norm: nnx.Param
    o_bias: nnx.Param

    def __init__(self, config: QwenConfig, weights: Mapping[str, Array]):
        self.config = config
        for name in layer_shapes(config):
            setattr(self, name, nnx.Param(weights[name]))

    def __call__(
        self,
        x: Array,
        cos: Array,
        sin: Array,
        layer: Array,
        window: Window,
        product: Product,
        attend: Attend[Carry],
        carry: Carry,
        exchange: Exchange = list,
    ) -> tuple[Array, Carry]:
        """Returns the residual stream after this layer, and what `attend` made of its carry.

        Args:
          x: float[row, q_pos, hidden].
          cos, sin: f32[row, q_pos, 1, head_dim / 2].
          layer: i32[], index of this layer.
          window: sliding window of this layer in tokens; None for all.
          product: `product(name, h)` is h times the layer's matrix of that name, all devices' parts added up.
          attend: see `Qwen.forward`.
          carry: the state of `attend`.
          exchange: joins each of several float[row, q_pos, column] along the columns with what other devices with the same
            heads have of it; on one device there is nothing to join.
        """
        config = self.config
        h = rms_norm(x, self.input_norm[...], config.rms_norm_eps)
        q, k, v = self._heads(product, exchange, h)
        if config.qk_norm:
            q = rms_norm(q, self.q_norm[...], config.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], config.rms_norm_eps)
        out, carry = attend(carry, layer, rotate(q, cos, sin), rotate(k, cos, sin), v, window)
        out = product("o_proj", out.reshape(*x.shape[:2], -1))
        x = x + (_add_bias(out, self.o_bias[...]) if config.o_bias else out)
        h = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
        gated = jax.nn.silu(product("gate_proj", h)) * product("up_proj", h)
        return x + product("down_proj", gated), carry

    def product(self, name: str, h: Array) -> Array:
        """Returns h times the matrix of that name, which this layer holds itself."""
        return h @ getattr(self, name)[...]

    def _heads(self, product: Product, exchange: Exchange, h: Array) -> list[Array]:
        """Projects to q, k and v float[row, q_pos, head, head_dim], all heads that this device keeps.

        The barrier keeps the layout the heads would like away from the weights: XLA:TPU else transposes the
        whole stacks of q, k and v before the loop (1.5 GB more for Qwen3-8B, at every dispatch).
        """
        parts = [product(f"{name}_proj", h) for name in "qkv"]
        if self.config.qkv_bias:
            biases = [getattr(self, f"{name}_bias")[...] for name in "qkv"]
            parts = [_add_bias(part, bias) for part, bias in zip(parts, biases, strict=True)]
        heads = *h.shape[:2], -1, self.config.head_dim
        return [jax.lax.optimization_barrier(x).reshape(heads) for x in exchange(parts)]


class Qwen(nnx.Module):
    """A Qwen2, Qwen3 or Llama decoder; follows the `DecoderModel` protocol of jaxkv.

    Attributes:
      config: static description.
      implementation: static; passed to the cache's ops.
      mesh_axes: static; the mesh axes its weights are divided along (`models.qwen.sharding`), the last of them that of
        devices with the same heads; empty on one device.
      embed: param[vocab, hidden].
      layers: DecoderLayer whose weights are stacked, param[layer, ...].
      final_norm: param[hidden].
      lm_head: param[vocab, hidden]; absent where it is tied to the embedding.
      matrices: after `spread`, name -> one param[out, in] a layer, and `layers` holds the rest; None before.
    """

    embed: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param

    def __init__(
        self, config: QwenConfig, weights: Mapping[str, Any], implementation: str = "auto"
    ):
        """Takes `weights` as `top_shapes` names them, plus "layers": a dict of the stacked `layer_shapes`.

        Raises:
          ValueError: a weight is missing or has another shape than the config says.
        """
        _check_shapes(config, weights)
        self.config = config
        self.implementation = implementation
        self.mesh_axes: tuple[str, ...] = ()
        for name in top_shapes(config):
            setattr(self, name, nnx.Param(weights[name]))
        self.layers = DecoderLayer(config, weights["layers"])
        self.matrices: nnx.Dict | None = nnx.data(None)

    def spread(self) -> Qwen:
        """Returns the model with every layer's matrices in arrays of their own, which is faster on CPU.

        The other weights are shared with this model; the matrices are copied.
        """
        model = nnx.clone(self)
        model.matrices = nnx.Dict()
        for name in layer_shapes(self.config):
            if name.endswith("_proj"):
                stack = getattr(self.layers, name)[...]
                model.matrices[name] = nnx.List([nnx.Param(matrix.T) for matrix in stack])
                delattr(model.layers, name)
        return model

    def layer_weight(self, name: str) -> Array:
        """Returns a weight of all layers, param[layer, ...], wherever the model keeps it."""
        if self.matrices is not None and name in self.matrices:
            return jnp.stack([matrix[...].T for matrix in self.matrices[name]])
        return getattr(self.layers, name)[...]

    @property
    def dtype(self) -> np.dtype:
        """Number type of the weights."""
        return np.dtype(self.embed[...].dtype)

    def __call__(self, tokens: Array, store: Store, view: BatchView) -> tuple[Array, Store]:
        """Runs new tokens through all layers, reading and writing K and V through the paged cache.

        ALIASES: under jit with a donated store the pool is updated in place.
        REQUIRES: `view` comes from `reserve`: the rows have room for their new tokens.

        Args:
          tokens: i32[row, q_pos], ids in [0, vocab); padding (j >= q_len) may hold any id.
          store: the pool, sized for this model.
          view: tables, lengths and positions of the rows.

        Returns:
          hidden: float[row, q_pos, hidden], after the final norm; padding holds rubbish.
          store: with the new tokens' K and V.

        Raises:
          ValueError: the store or the view does not fit the model or the tokens.
        """
        self._check_call(tokens, store, view)
        scale = self.config.head_dim**-0.5
        read = rows_to_read(view, store, self.mesh_axes[-1]) if self.mesh_axes else view

        def attend(
            store: Store, layer: Array, q: Array, k: Array, v: Array, window: Window
        ) -> tuple[Array, Store]:
            return cached_attention(
                q, k, v, store, layer, view,
                scale=scale, window=window, implementation=self.implementation, read=read,
            )  # fmt: skip

        return self.forward(tokens, view.positions, attend, store)

    def forward(
        self, tokens: Array, positions: Array, attend: Attend[Carry], carry: Carry
    ) -> tuple[Array, Carry]:
        """Runs the layers with any attention.

        Args:
          tokens, positions: i32[row, q_pos].
          attend: `attend(carry, layer, q, k, v, window) -> (out, carry)` with layer i32[], q and out
            float[row, q_pos, q_head, head_dim], k and v float[row, q_pos, kv_head, head_dim], both rotated, all of the
            device's own heads; on a mesh the sum of the devices' out is taken (see `rows_to_read`);
            window an i32[] or int (`NO_WINDOW` for full layers between sliding ones), or None.
          carry: first state of `attend`; its structure and shapes do not change.

        Returns:
          hidden float[row, q_pos, hidden] after the final norm, and the last carry.
        """
        x = self._embed(tokens)
        cos, sin = cos_sin(self.config.rope, self.config.head_dim, positions)
        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)

        def step(state: tuple[Array, Carry], xs: tuple[DecoderLayer, Array, Array | None]) -> Any:
            weights, layer, window = xs
            product, exchange = self._product(weights, layer), self._exchange
            args = cos, sin, layer, window, product, attend, state[1]
            return weights(state[0], *args, exchange=exchange), None

        xs = (self.layers, layers, layer_windows(self.config))
        (x, carry), _ = jax.lax.scan(step, (x, carry), xs)
        return rms_norm(x, self.final_norm[...], self.config.rms_norm_eps), carry

    def _embed(self, tokens: Array) -> Array:
        """Returns the embeddings float[row, q_pos, hidden] of tokens."""
        embed = self.embed[...]
        if not self.mesh_axes:
            return jnp.take(embed, tokens, axis=0, mode="clip")
        tokens = jnp.clip(tokens, 0, self.config.vocab_size - 1)
        tokens -= jax.lax.axis_index(self.mesh_axes) * embed.shape[0]
        mine = (tokens >= 0) & (tokens < embed.shape[0])
        x = jnp.take(embed, tokens, axis=0, mode="clip")
        return jax.lax.psum(jnp.where(mine[..., None], x, 0), self.mesh_axes)

    def _product(self, weights: DecoderLayer, layer: Array) -> Product:
        """Returns how the layer multiplies: with its slice of the stack, or with the array of its own."""
        matrices = self.matrices

        def product(name: str, h: Array) -> Array:
            if name == "o_proj" and self._num_row_shards > 1:
                h = jax.lax.psum_scatter(h, self.mesh_axes[1], scatter_dimension=2, tiled=True)
            if matrices is None:
                out = weights.product(name, h)
            else:
                one_a_layer = [functools.partial(_times, matrix[...]) for matrix in matrices[name]]
                out = jax.lax.switch(layer, one_a_layer, h)
            if self.mesh_axes and name in SUMMED:
                out = jax.lax.psum(out, self.mesh_axes)
            return out

        return product

    @property
    def _num_row_shards(self) -> int:
        """Devices that keep the same heads; each has an equal part of the columns that q, k and v have there, and of o's rows."""
        return jax.lax.axis_size(self.mesh_axes[1]) if self.mesh_axes else 1

    def _exchange(self, parts: list[Array]) -> list[Array]:
        """See `DecoderLayer.__call__`; one exchange for all parts."""
        if self._num_row_shards == 1:
            return parts
        joined = jnp.concatenate(parts, axis=-1)
        joined = jax.lax.all_gather(joined, self.mesh_axes[1])  # [device, row, q_pos, column]
        ends = list(itertools.accumulate(part.shape[-1] for part in parts))[:-1]
        pieces = jnp.split(joined, ends, axis=-1)
        return [jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1) for x in pieces]

    def unembed(self, hidden: Array) -> Array:
        """Returns logits f32[..., vocab] of float[..., hidden] (as `__call__` returns it)."""
        head = self.embed if self.config.tie_word_embeddings else self.lm_head
        logits = _times(head[...], hidden, jnp.float32)
        if not self.mesh_axes:
            return logits
        logits = jax.lax.all_gather(logits, self.mesh_axes, axis=logits.ndim - 1, tiled=True)
        return logits[..., : self.config.vocab_size]

    def _check_call(self, tokens: Array, store: Store, view: BatchView) -> None:
        config, layout = self.config, store.layout
        shards = jax.lax.axis_size(self.mesh_axes[0]) if self.mesh_axes else 1
        for name, expected in (
            ("num_layers", config.num_layers),
            ("num_kv_heads", config.num_kv_heads // shards),
            ("head_dim", config.head_dim),
        ):
            if getattr(layout, name) != expected:
                raise ValueError(
                    f"store: expected {name} {expected} of the model, got {getattr(layout, name)}"
                )
        if tokens.shape != view.positions.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens: expected integers of shape {view.positions.shape}, got {tokens.dtype}{list(tokens.shape)}"
            )


def layer_windows(config: QwenConfig) -> Array | None:
    """Returns i32[layer], `NO_WINDOW` where a layer is full; None if no layer slides."""
    if not config.slides:
        return None
    return jnp.asarray(
        [NO_WINDOW if window is None else window for window in config.windows], jnp.int32
    )


def _times(matrix: Array, h: Array, dtype: DTypeLike | None = None) -> Array:
    """Returns matrix[out, in] times h[..., in], as dtype[..., out].

    For a few rows the matrix is the left operand; the barrier keeps the compiler from swapping the operands back while
    it folds the transpose.
    """
    if h.size > FEW_ROWS * h.shape[-1]:
        return jax.lax.dot_general(
            h, matrix, (((h.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype
        )
    out = jax.lax.dot_general(
        matrix, h, (((1,), (h.ndim - 1,)), ((), ())), preferred_element_type=dtype
    )
    return jnp.moveaxis(jax.lax.optimization_barrier(out), 0, -1)


def _add_bias(x: Array, bias: Array) -> Array:
    return x + bias.reshape(1, 1, -1)


def _check_shapes(config: QwenConfig, weights: Mapping[str, Any]) -> None:
    """Raises ValueError naming every weight that is missing or misshapen."""
    expected: dict[str, tuple[int, ...]] = dict(top_shapes(config))
    expected |= {
        f"layers.{name}": (config.num_layers, *shape)
        for name, shape in layer_shapes(config).items()
    }
    given = {name: value for name, value in weights.items() if name != "layers"}
    given |= {f"layers.{name}": value for name, value in weights.get("layers", {}).items()}
    faults = [f"{name}: missing" for name in expected if name not in given]
    faults += [
        f"{name}: expected {shape}, got {tuple(given[name].shape)}"
        for name, shape in expected.items()
        if name in given and tuple(given[name].shape) != shape
    ]
    faults += [f"{name}: not a weight of this model" for name in given if name not in expected]
    if faults:
        raise ValueError("weights: " + "; ".join(faults))
