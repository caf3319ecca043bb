"""Clients that leave, queues that fill, servers that stop: nothing is left behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted_engine import BULKY, HOLD, LATE, SLOW, ScriptedEngine
from serving import Running, running

from jaxkv.serve import Limits, bind
from models.qwen import Tokenizer


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Starts a call in a thread; returns the thread and the list that gets its result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_gives_its_blocks_back(scripted: Running, stream: bool) -> None:
    stats = scripted.engine.stats
    fields = {"model": "tiny", "prompt": [[HOLD, 5, 6], [HOLD]], "n": 2, "stream": stream}
    with httpx.Client(base_url=scripted.url, trust_env=False) as client:
        request = client.build_request("POST", "/v1/completions", json=fields, timeout=0.3)
        if stream:
            answer = client.send(request, stream=True)
            lines = answer.iter_lines()  # letting go of it would close the connection
            assert next(lines).startswith("data: {")
            assert stats.num_live == 4
            answer.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.send(request)
    wait_for(lambda: stats.num_live == 0)
    wait_for(lambda: 'status="499"' in scripted.client.get("/metrics").text)
    assert scripted.complete().status_code == 200


def test_full_queue_is_429_until_there_is_room(scripted: Running) -> None:
    stats = scripted.engine.stats
    with httpx.Client(base_url=scripted.url, trust_env=False) as client:
        fields = {"model": "tiny", "prompt": [[HOLD], [HOLD]], "n": 3, "stream": True}
        request = client.build_request("POST", "/v1/completions", json=fields)
        answer = client.send(request, stream=True)
        wait_for(lambda: stats.num_live == 2)
        assert scripted.complete(n=2).status_code == 200  # 6 + 2 sequences fill the queue of 8
        refused = scripted.complete(n=3)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "jaxkv_in_flight 6.0" in scripted.client.get("/metrics").text
        answer.close()
    wait_for(lambda: stats.num_live == 0)
    assert scripted.complete(n=3).status_code == 200


def test_stream_that_waits_gets_comments_and_says_the_same(
    scripted: Running, tokenizer: Tokenizer
) -> None:
    """The first comes before any token; an answer that is no stream, and a stream that flows, get none."""
    fields: dict[str, Any] = {"prompt": [LATE, 5, 6], "max_tokens": 6, "stream": True}
    fields["stream_options"] = {"include_usage": True}

    def told(parts: list[str]) -> list[object]:
        chunks = [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]
        return [(chunk["choices"], chunk["usage"]) for chunk in chunks]

    plain = scripted.complete(**fields).text.strip().split("\n\n")
    with running(ScriptedEngine(tokenizer), limits=Limits(keep_alive_s=0.03)) as server:
        parts = server.complete(**fields).text.strip().split("\n\n")
        assert server.complete(prompt=[LATE], max_tokens=3).json()["usage"]["total_tokens"] == 4
        assert ":" not in [part[0] for part in server.complete(stream=True).text.split()]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with server.client.stream("POST", "/v1/chat/completions", json=chat) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        held = {"model": "tiny", "prompt": [HOLD, 5], "stream": True}
        with server.client.stream("POST", "/v1/completions", json=held) as answer:
            lines = [line for line, _ in zip(answer.iter_lines(), range(8), strict=False) if line]
            assert lines[0].startswith("data: {")
            assert lines[1:] == [": keep-alive"] * 3
        wait_for(lambda: server.engine.stats.num_live == 0)
    comments = [part for part in parts if part.startswith(":")]
    assert parts[0] == ": keep-alive"
    assert set(comments) == {": keep-alive"}
    assert 2 <= len(comments) <= 6
    assert told([part for part in parts if part not in comments]) == told(plain)
    usage = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert told(plain)[-1] == ([], usage | {"prompt_tokens_details": {"cached_tokens": 1}})
    assert (parts[-1], plain[-1]) == ("data: [DONE]", "data: [DONE]")


def test_stream_nobody_reads_is_given_up(tokenizer: Tokenizer) -> None:
    """The socket's buffers fill; the request ends nevertheless and leaves nothing."""
    engine = ScriptedEngine(tokenizer, max_len=1000)
    limits = Limits(write_timeout_s=0.2)
    with running(engine, limits=limits) as server:
        fields = {"model": "tiny", "prompt": [BULKY], "max_tokens": 400, "stream": True}
        request = server.client.build_request("POST", "/v1/completions", json=fields)
        answer = server.client.send(request, stream=True)
        wait_for(lambda: 'status="499"' in httpx.get(f"{server.url}/metrics", trust_env=False).text)
        answer.close()
        assert server.complete().status_code == 200


def test_shutdown_lets_running_requests_finish_and_refuses_new_ones(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer)
    with running(engine) as server:
        thread, results = in_background(lambda: server.complete(prompt=[SLOW], max_tokens=40))
        wait_for(lambda: engine.stats.num_live == 1)
        with httpx.Client(base_url=server.url, trust_env=False) as other:
            assert other.get("/health").status_code == 200
            server.server.stop()
            wait_for(lambda: other.get("/health").status_code == 503)
            refused = other.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        thread.join(10)
        [answer] = results
        assert isinstance(answer, httpx.Response)
        assert answer.json()["usage"]["completion_tokens"] == 40
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert engine.stopped == [False]


@pytest.mark.parametrize("hurry", [False, True])
def test_shutdown_cancels_what_outlasts_the_grace(tokenizer: Tokenizer, hurry: bool) -> None:
    engine = ScriptedEngine(tokenizer)
    with running(engine, grace_s=30.0 if hurry else 0.2) as server:
        fields = {"model": "tiny", "prompt": [HOLD, 5]}
        post = httpx.Client(base_url=server.url, trust_env=False)
        whole, answers = in_background(lambda: post.post("/v1/completions", json=fields))
        with server.client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as s:
            lines = s.iter_lines()
            next(lines)
            wait_for(lambda: engine.stats.num_live == 4)
            server.server.stop()
            if hurry:
                server.server.stop()
            rest = "".join(lines)
        assert '"code":"shutting_down"' in rest
        assert "[DONE]" not in rest
        whole.join(10)
        [answer] = answers
        assert isinstance(answer, httpx.Response)
        assert answer.status_code == 503
        server.thread.join(10)
        assert not server.thread.is_alive()
        post.close()
    assert engine.stats.num_live == 0


def test_bind_refuses_a_port_in_use_and_one_out_of_range() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"host, port: .* got 127.0.0.1, {port}: "):
            bind("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"port: expected one in .*got 70000"):
        bind("127.0.0.1", 70000)
