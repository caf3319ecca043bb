"""Fixtures of the engine's tests; what they are made of is in engine_driver.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_driver import EOS, alone, assert_all_blocks_are_back, engine_of

from jaxkv.engine import Engine


@pytest.fixture(params=[0, 3], ids=["plain", "drafts"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An idle engine; whatever it still knows of other tests' prompts stays findable."""
    engine = engine_of(request.param)
    assert engine.idle
    yield engine
    with engine:
        pass
    assert_all_blocks_are_back(engine)


@pytest.fixture
def expect_alone() -> Callable[[list[Any]], None]:
    """Checks that handles brought what their requests bring alone."""

    def check(handles: list[Any]) -> None:
        for handle in handles:
            request = handle.request
            for output in handle.outputs:
                expected = alone(
                    handle.prompt, request.max_tokens, request.sampling, output.sample_index
                )
                assert output.tokens == expected, (handle.id, output)
                ends = expected[-1] == EOS
                assert output.finish_reason == ("stop" if ends else "length")

    return check
