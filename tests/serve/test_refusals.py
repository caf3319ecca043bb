"""Every answer that is no success: its status, its body, and the server that lives on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from scripted_engine import (
    CRASH,
    CRASH_LATER,
    FAIL,
    REFUSE,
    TOO_LARGE,
    ScriptedEngine,
)
from serving import Running, running

from jaxkv.serve import Limits, Served
from jaxkv.serve.errors import APIError
from jaxkv.serve.parse import Job, parse_chat, parse_completion
from models.qwen import Tokenizer

LIMITS = Limits(max_n=4, max_prompts=3, max_prompt_len=40, max_queue=8)


def check_error(answer: httpx.Response, status: int, code: str | None, *parts: str) -> None:
    """The answer has the status and OpenAI's body, whose message holds the parts."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert all(part in error["message"] for part in parts), error["message"]


CHAT = [{"role": "user", "content": "hi"}]
BAD_COMPLETION: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "got nothing"),
    ({"prompt": ""}, "prompt", "expected at least one token"),
    ({"prompt": []}, "prompt", "got []"),
    ({"prompt": [[]]}, "prompt", "expected at least one token"),
    ({"prompt": [1, "a"]}, "prompt", "a list of either"),
    ({"prompt": [1, True]}, "prompt", "a list of either"),
    ({"prompt": [-1]}, "prompt", "a list of either"),
    ({"prompt": {"a": 1}}, "prompt", "a list of either"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": ["a"] * 4}, "prompt", "at most 3 prompts, got 4"),
    ({"prompt": [5] * 41}, "prompt", "at most 40 tokens, got 41"),
    ({"prompt": [5] * 40, "max_tokens": 25}, "prompt", "within 64 tokens, got 40 + 25"),
    ({"max_tokens": 0}, "max_tokens", "got 0"),
    ({"max_tokens": "16"}, "max_tokens", 'got "16"'),
    ({"max_tokens": True}, "max_tokens", "got true"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": -1}, "temperature", "got -1"),
    ({"temperature": 10**400}, "temperature", "finite"),
    ({"top_p": 0}, "top_p", "got 0"),
    ({"min_p": 2}, "min_p", "got 2"),
    ({"top_k": -1}, "top_k", "got -1"),
    ({"n": 0}, "n", "got 0"),
    ({"n": 5}, "n", "at most 4, got 5"),
    ({"n": 4, "prompt": ["a", "b", "c"]}, "n", "at most 8 sequences"),
    ({"seed": 2**63}, "seed", "expected an integer"),
    ({"seed": 1.5}, "seed", "got 1.5"),
    ({"stop": [""]}, "stop", "none of them empty"),
    ({"stop": 3}, "stop", "got 3"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 strings, got 17"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "a list of token ids"),
    ({"logprobs": 1}, "logprobs", "got 1"),
    ({"logprobs": True}, "logprobs", "got true"),
    ({"best_of": 2}, "best_of", "got 2"),
    ({"stream": "yes"}, "stream", 'got "yes"'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options", "include_usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "true or false"),
    ({"model": None}, "model", "expected 'tiny'"),
    ({"model": 3}, "model", "a string"),
    ({"priority": 2**40}, "priority", "expected an integer"),
    ({"tenant": -1}, "tenant", "expected an integer"),
    ({"cache_salt": 3}, "cache_salt", "a string"),
    ({"ignore_eos": 1}, "ignore_eos", "true or false"),
    ({"logit_bias": {"5": 100}}, "logit_bias", "expected {}"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "expected 0"),
    ({"presence_penalty": -1}, "presence_penalty", "expected 0"),
    ({"echo": True}, "echo", "expected false"),
    ({"suffix": "end"}, "suffix", 'expected ""'),
    ({"messages": CHAT}, "messages", "not supported"),
    ({"\ud800": 1}, "\\ud800", "not supported"),
]
BAD_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "not empty"),
    ({"messages": "hi"}, "messages", "a list of messages"),
    ({"messages": ["hi"]}, "messages[0]", "an object"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", '"tool"'),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "got null"),
    ({"messages": [*CHAT, {"role": "user"}]}, "messages[1].content", "got null"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "text parts",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "not supported",
    ),
    ({"messages": [{"role": "user", "content": "hi " * 60}]}, "messages", "at most 40 tokens"),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs", "got 2"),
    ({"logprobs": 0}, "logprobs", "true or false"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "or only one"),
    ({"tools": [{"type": "function"}]}, "tools", "expected []"),
    ({"tool_choice": "required"}, "tool_choice", '"required"'),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"modalities": ["audio"]}, "modalities", "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"prompt": "hi"}, "prompt", "not supported"),
]


def served(tokenizer: Tokenizer | None) -> Served:
    return Served("tiny", max_len=64, pool_tokens=128, kv_format="float32", tokenizer=tokenizer)


def completion(tokenizer: Tokenizer | None, **fields: Any) -> Job:
    body = {"model": "tiny", "prompt": [5]} | fields
    return parse_completion(json.dumps(body).encode(), served(tokenizer), LIMITS)


def chat(tokenizer: Tokenizer | None, **fields: Any) -> Job:
    body = {"model": "tiny", "messages": CHAT} | fields
    return parse_chat(json.dumps(body).encode(), served(tokenizer), LIMITS)


def test_parse_refuses_every_bad_field_by_name(tokenizer: Tokenizer) -> None:
    for parse, cases in ((completion, BAD_COMPLETION), (chat, BAD_CHAT)):
        for fields, param, part in cases:
            with pytest.raises(APIError) as caught:
                parse(tokenizer, **fields)
            error = caught.value
            assert (error.status, error.param) == (400, param), (fields, error.message)
            assert part in error.message, (fields, error.message)


def test_parse_without_tokenizer_or_template_takes_ids_only(tokenizer: Tokenizer) -> None:
    assert completion(None, prompt=[[5, 6], [7]]).requests[1].prompt == [7]
    for call in (lambda: completion(None, prompt="a"), lambda: chat(None)):
        with pytest.raises(APIError, match=r"prompt: .*no tokenizer|messages: .*chat template"):
            call()


def test_parse_takes_what_asks_for_nothing_and_what_does_no_harm(tokenizer: Tokenizer) -> None:
    fields = {
        "frequency_penalty": 0.0, "logit_bias": {}, "presence_penalty": None, "user": "me", "n": 2, "best_of": 2,
        "metadata": {"a": "b"}, "store": False, "echo": False, "suffix": None,
    }  # fmt: skip
    job = completion(tokenizer, prompt=["once", "upon"], **fields)
    assert job.num_choices == 4
    assert job.requests[0].prompt == tokenizer.encode("once")
    assert (job.requests[0].max_tokens, job.requests[0].sampling.temperature) == (16, 1.0)
    assert job.requests[0].sampling.seed != job.requests[1].sampling.seed
    fields = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    job = chat(tokenizer, **fields, messages=[{"role": "user", "content": parts, "name": "me"}])
    assert job.requests == chat(tokenizer, seed=job.requests[0].sampling.seed).requests
    assert tokenizer.decode(job.requests[0].prompt) == "Q: hi\nA:"
    assert job.requests[0].max_tokens == 64 - len(job.requests[0].prompt)


def test_parse_extensions_reach_the_request(tokenizer: Tokenizer) -> None:
    fields = {
        "top_k": 3, "min_p": 0.1, "priority": -2, "tenant": 1, "cache_salt": "s", "stop": "x", "stop_token_ids": [9],
        "ignore_eos": True, "seed": -1, "top_p": 0.5, "temperature": 0,
    }  # fmt: skip
    [request] = completion(tokenizer, **fields).requests
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.top_p) == (3, 0.1, 0.5)
    assert (sampling.seed, sampling.temperature) == (2**32 - 1, 0)
    assert (request.priority, request.ignore_eos) == (-2, True)
    assert (request.namespace.tenant, request.namespace.salt) == (1, "s")
    assert (request.stop, request.stop_ids) == (("x",), (9,))


BAD_BODIES = [b"", b"{", b"\xff\xfe", b"[1]", b'"a"', b"[" * 4000, b'{"model": NaN}', b"1" * 3900]


def test_server_refuses_each_case_with_its_status_and_lives_on(scripted: Running) -> None:
    client = scripted.client
    for body in BAD_BODIES:
        check_error(client.post("/v1/completions", content=body), 400, None, "body: expected")
    check_error(scripted.complete(temperature="hot"), 400, None, "temperature: expected a number")
    check_error(scripted.complete(tools=[1]), 400, "unsupported_field", "tools")
    check_error(scripted.complete(prompt=[5] * 41), 400, "context_length_exceeded", "got 41")
    check_error(scripted.complete(n=5), 400, None, "n: expected at most 4")
    check_error(scripted.complete(prompt=[REFUSE]), 400, None, "n: expected fewer")
    check_error(scripted.complete(prompt=[TOO_LARGE]), 400, "capacity_exceeded", "99")
    check_error(scripted.complete(model="gpt-4"), 404, "model_not_found", "'gpt-4'")
    check_error(client.get("/v1/models/gpt-4"), 404, "model_not_found", "'gpt-4'")
    check_error(client.get("/v1/nowhere"), 404, None, "/v1/nowhere")
    check_error(client.get("/v1/models/"), 404, "model_not_found")
    refused = client.get("/v1/completions")
    check_error(refused, 405, None, "GET")
    assert refused.headers["allow"] == "POST"
    check_error(client.post("/health"), 405, None, "POST")
    large = b"x" * 5000
    check_error(client.post("/v1/completions", content=large), 413, "body_too_large", "4096")
    parts = iter([large, large])  # no length announced
    check_error(client.post("/v1/completions", content=parts), 413, "body_too_large", "4096")
    answer = scripted.complete()
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert client.get("/health").json() == {"status": "ok"}
    assert scripted.engine.stats.num_live == 0


@pytest.mark.filterwarnings("ignore")
def test_server_engine_errors_are_500_and_keep_their_secrets(scripted: Running) -> None:
    for prompt in ([CRASH], [CRASH_LATER, 5]):
        answer = scripted.complete(prompt=prompt)
        check_error(answer, 500, "engine_error", "RuntimeError")
        assert "secret" not in answer.text
    check_error(scripted.complete(prompt=[FAIL, 5]), 500, "engine_error", "got NaN")
    check_error(scripted.complete(prompt=[[5], [CRASH]], max_tokens=40), 500, "engine_error")
    streamed = scripted.complete(prompt=[CRASH_LATER, 5], stream=True)
    events = streamed.text.strip().split("\n\n")
    assert streamed.status_code == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert "[DONE]" not in streamed.text
    check_error(scripted.client.get("/health"), 500, "engine_error")
    assert scripted.complete().status_code == 200
    assert scripted.client.get("/health").status_code == 200
    assert scripted.engine.stats.num_live == 0


def test_server_with_a_key_answers_401_without_it(tokenizer: Tokenizer) -> None:
    with running(ScriptedEngine(tokenizer), api_key="kéy") as server:
        for value in (None, b"", b"k\xc3\xa9y", b"Bearer k", b"Bearer \xff", b"Basic k\xc3\xa9y"):
            headers = {} if value is None else {b"Authorization": value}
            for path in ("/v1/models", "/v1/nowhere"):
                answer = server.client.get(path, headers=headers)
                check_error(answer, 401, "invalid_api_key", "Authorization")
                assert answer.json()["error"]["type"] == "authentication_error"
        assert server.client.get("/health").status_code == 200
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n"
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head)  # the body never comes, and nobody waits for it
            assert b" 401 " in connection.recv(4096).splitlines()[0]
        good = {b"Authorization": b"Bearer k\xc3\xa9y"}
        assert server.client.get("/v1/models", headers=good).json()["data"][0]["id"] == "tiny"


def test_server_malformed_http_is_400_and_a_silent_client_408(tokenizer: Tokenizer) -> None:
    limits = Limits(body_timeout_s=0.2)
    with running(ScriptedEngine(tokenizer), limits=limits) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n"
        for sent, status in ((b"\x00garbage\r\n\r\n", b" 400 "), (head + b"{", b" 408 ")):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(sent)
                assert status in connection.recv(4096).splitlines()[0]
        assert server.complete().status_code == 200
