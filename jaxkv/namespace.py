"""Who may share cached blocks with whom: a typed key that becomes a fixed row of integers.

Invariants:
  * Two namespaces have equal words only if every field has the same type and the same value (up to a collision
    of a 224-bit BLAKE2b digest).
  * The words do not depend on the process, the machine or the order in which things were loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

NUM_WORDS = 8  # the tenant, then 7 words of digest

Value = None | bool | int | str | bytes | tuple["Value", ...]


@dataclasses.dataclass(frozen=True)
class Namespace:
    """Everything besides the tokens that K and V depend on, or that must keep them apart.

    Attributes:
      tenant: index of the tenant, >= 0; `Fair` weighs it.
      salt: a secret of the tenant or the session: without it nobody can probe for another's prompts.
      adapter: identity of the adapter, its version with it, for instance ("name", 2); None: no adapter.
      model_revision: of the weights.
      format: of the K/V, `CacheConfig.format`.

    Raises:
      ValueError: the tenant is no index, or a field has a type without a defined encoding.
    """

    tenant: int = 0
    salt: Value = None
    adapter: Value = None
    model_revision: Value = None
    format: str = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.tenant, bool) or not isinstance(self.tenant, int):
            raise ValueError(f"tenant: expected an integer, got {self.tenant!r}")
        if not 0 <= self.tenant < 2**31:
            raise ValueError(f"tenant: expected an index in [0, 2**31), got {self.tenant}")
        self.words()

    def words(self) -> np.ndarray:
        """Returns i32[8]: the tenant's index and a digest of all fields."""
        digest = hashlib.blake2b(digest_size=4 * (NUM_WORDS - 1), person=b"jaxkv namespace")
        for field in dataclasses.fields(self):
            digest.update(_encode(field.name))
            digest.update(_encode(getattr(self, field.name)))
        words = np.frombuffer(digest.digest(), "<i4")
        return np.concatenate([np.array([self.tenant], np.int32), words.astype(np.int32)])


def _encode(value: Value) -> bytes:
    """Returns bytes that spell type, length and value, so that no two values share an encoding."""
    kind = type(value)
    if kind is tuple:
        body = b"".join(_encode(part) for part in value)  # type: ignore[union-attr]
    elif kind in (type(None), bool, int):
        body = repr(value).encode()
    elif kind is str:
        body = value.encode()  # type: ignore[union-attr]
    elif kind is bytes:
        body = value  # type: ignore[assignment]
    else:
        raise ValueError(
            f"namespace: expected None, bool, int, str, bytes or a tuple, got {value!r}"
        )
    return f"{kind.__name__}:{len(body)}:".encode() + body
