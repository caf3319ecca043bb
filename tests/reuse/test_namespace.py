"""Namespaces: no two that differ in type or value have equal words, in any process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxkv.namespace import NUM_WORDS, Namespace


def test_namespaces_that_differ_in_anything_differ_in_words() -> None:
    """Field case G1 (an adapter's next version) and its kind: types, moved boundaries, -1 and -2."""
    values: list[Any] = [
        None, "None", b"None", "", b"", (), (None,), 0, 1, -1, -2, True, False, "1", b"1", ("a", 1),
        ("a", 2), ("a", "1"), ("a1",), "a", "ab", ("a", "b"), (("a",), "b"), (("a", "b"),),
    ]  # fmt: skip
    spaces = [Namespace()]
    for field, value in itertools.product(("salt", "adapter", "model_revision"), values[1:]):
        spaces.append(Namespace(**{field: value}))
    spaces += [Namespace(tenant=1), Namespace(format="int8"), Namespace(salt="a", adapter="b")]
    spaces += [Namespace(salt="b", adapter="a"), Namespace(salt="ab")]
    words = [space.words() for space in spaces]
    assert len({w.tobytes() for w in words}) == len(set(map(repr, spaces)))
    assert all(w.shape == (NUM_WORDS,) and w.dtype == np.int32 for w in words)
    assert [int(w[0]) for w in words] == [space.tenant for space in spaces]


def test_namespace_words_are_equal_in_every_process() -> None:
    """Field case G3."""
    code = (
        "from jaxkv.namespace import Namespace;"
        "print(Namespace(2, 'salt', ('a', 1), 'rev', 'int8').words().tolist())"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    here = Namespace(2, "salt", ("a", 1), "rev", "int8").words().tolist()
    assert seen == [str(here)] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tenant": -1}, "tenant: expected an index"),
        ({"tenant": True}, "tenant: expected an integer, got True"),
        ({"salt": 1.5}, "namespace: expected None, bool, int, str, bytes or a tuple, got 1.5"),
        ({"adapter": ["a"]}, "namespace: expected"),
    ],
)
def test_namespace_of_undefined_meaning_raises(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Namespace(**fields)
