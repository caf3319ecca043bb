"""Text up to the first stop string, whatever pieces it comes in."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from jaxkv.stop_text import StopText


class _Pieces:
    """Token i is the i-th piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def flush(self) -> str:
        return ""


@hypothesis.settings(deadline=None)
@hypothesis.given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_the_text_is_cut_at_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """Nothing is given out that a stop string may still take back, and nothing is lost."""
    whole, given, stopped = "", "", False
    text = StopText(_Pieces(pieces), stops)
    for i, piece in enumerate(pieces):
        whole += piece
        new, stopped = text.push(i)
        given += new
        found = min((whole.find(stop) for stop in stops if stop in whole), default=-1)
        assert stopped == (found >= 0)
        if stopped:
            assert given == whole[:found]
            return
        assert whole.startswith(given)
        held = whole[len(given) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert given + text.flush()[0] == whole
