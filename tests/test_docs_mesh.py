"""docs/mesh.md: its example runs, and gives what one device gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import init_cache, reserve
from pallas_kernels.cached_attention import cached_attention

PAGE = (Path(__file__).parents[1] / "docs" / "mesh.md").read_text(encoding="utf-8")


def test_mesh_page_example_gives_what_one_device_gives() -> None:
    [code] = re.findall(r"```python\n(import dataclasses\n.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/mesh.md", "exec"), names)
    config, q_lens = names["CONFIG"], jnp.array([5, 2, 0, 4], jnp.int32)
    cache, view = reserve(config, init_cache(config), names["ROWS"], q_lens, 5)
    q, k, v = (names[name] for name in "qkv")
    out, store = jax.jit(cached_attention)(q, k, v, cache.store, 0, view, scale=0.25)
    np.testing.assert_array_equal(names["out"], out)
    np.testing.assert_array_equal(names["cache"].store.kv, store.kv)
    assert len(names["cache"].store.kv.sharding.device_set) == 2
    assert np.abs(np.asarray(out)).max() > 0.1
