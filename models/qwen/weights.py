"""What every weight file has in common: names against shapes, and stacking layers.

Invariants: nothing is read before every name and shape is checked; all faults are raised at once; files hold
matrices as [out, in], the model as [in, out]; a change of number type that loses a value to infinity is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.qwen.config import QwenConfig
from models.qwen.modeling import Qwen, layer_shapes, top_shapes

Naming = Callable[[str, int | None], str]  # (our name, layer or None) -> name in the file


def is_matrix(name: str) -> bool:
    """Whether a weight is stored transposed in files (projections; not the embedding or the head)."""
    return name.endswith("_proj")


def file_shapes(config: QwenConfig, naming: Naming) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor the file must hold, by its name in the file."""
    shapes = {naming(name, None): shape for name, shape in top_shapes(config).items()}
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            shapes[naming(name, layer)] = shape[::-1] if is_matrix(name) else shape
    return shapes


def check_names(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Compares the tensors of a file with what the config asks for.

    Raises:
      ValueError: names all missing, unexpected and misshapen tensors at once.
    """
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected))
    misshapen = [
        f"{name} (expected {list(expected[name])}, got {list(found[name])})"
        for name in sorted(set(expected) & set(found))
        if tuple(found[name]) != tuple(expected[name])
    ]
    faults = [
        f"{kind} {', '.join(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if names
    ]
    if faults:
        raise ValueError(f"{where}: weights do not fit the config: " + "; ".join(faults))


def build_model(
    config: QwenConfig,
    naming: Naming,
    read: Callable[[str], np.ndarray],
    dtype: DTypeLike,
    implementation: str = "auto",
) -> Qwen:
    """Reads all tensors and stacks the layers; holds one stacked weight beside the model while it works.

    Args:
      config: checked against the file by `check_names` before.
      naming: names in the file.
      read: returns a tensor by its name in the file, any float type, in the file's orientation.
      dtype: number type of the model's weights.
      implementation: passed to `Qwen`.

    Raises:
      ValueError: a finite value does not fit `dtype`.
    """
    target = np.dtype(jnp.dtype(dtype))
    weights: dict = {
        name: jnp.asarray(_convert(read(naming(name, None)), target, naming(name, None)))
        for name in top_shapes(config)
    }
    weights["layers"] = {
        name: jnp.asarray(_stack(config, naming, read, name, shape, target))
        for name, shape in layer_shapes(config).items()
    }
    return Qwen(config, weights, implementation)


def _stack(
    config: QwenConfig,
    naming: Naming,
    read: Callable[[str], np.ndarray],
    name: str,
    shape: tuple[int, ...],
    target: np.dtype,
) -> np.ndarray:
    """Returns target[layer, ...]: one weight of all layers, matrices as [in, out]."""
    out = np.empty((config.num_layers, *shape), target)
    for layer in range(config.num_layers):
        tensor = _convert(read(naming(name, layer)), target, naming(name, layer))
        out[layer] = tensor.T if is_matrix(name) else tensor
    return out


def _convert(tensor: np.ndarray, target: np.dtype, name: str) -> np.ndarray:
    """Casts explicitly; only a narrower exponent can lose a value, so only float16 is looked through."""
    if tensor.dtype == target:
        return tensor
    with np.errstate(over="ignore"):
        out = tensor.astype(target)
    if target == np.float16 and not np.array_equal(np.isfinite(out), np.isfinite(tensor)):
        raise ValueError(
            f"{name}: expected values that fit float16 (at most 65504), got larger ones"
        )
    return out


def unstack(model: Qwen, naming: Naming) -> Iterable[tuple[str, np.ndarray]]:
    """Yields (name in the file, tensor in the file's orientation) of every weight; inverse of `build_model`."""
    for name in top_shapes(model.config):
        yield naming(name, None), np.asarray(getattr(model, name)[...])
    for name in layer_shapes(model.config):
        stacked = np.asarray(model.layer_weight(name))
        for layer in range(model.config.num_layers):
            tensor = stacked[layer].T if is_matrix(name) else stacked[layer]
            yield naming(name, layer), np.ascontiguousarray(tensor)
