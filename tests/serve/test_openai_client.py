"""The official client against the real engine and the model that ships, and the field cases of preemption."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from serving import Running

from jaxkv.serve.fields import HARMLESS, NEUTRAL
from jaxkv.serve.parse import CHAT_FIELDS, COMPLETION_FIELDS
from models.qwen import LoadedModel, dense_forward

PROMPT = "Once upon a time there was a little girl who had a small dog and"
MESSAGES: Any = [{"role": "user", "content": "Who is the dog's friend?"}]


@pytest.fixture(scope="module")
def client(real: Running) -> Iterator[openai.OpenAI]:
    """The official client; it does not try again."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{real.url}/v1", api_key="any", max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """Asks for a completion, greedy by default."""
    fields = {"temperature": 0, "max_tokens": 12} | fields
    extra = {
        name: fields.pop(name)
        for name in ("ignore_eos", "priority", "cache_salt")
        if name in fields
    }
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)


def greedy(loaded: LoadedModel, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The greedy continuation and its log-probabilities, without a cache."""

    @jax.jit
    def forward(model: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
        hidden = dense_forward(model, tokens)
        return jax.nn.log_softmax(model.unembed(hidden[:, last])[0])

    tokens, logprobs = list(prompt), []
    for _ in range(count):
        padded = jnp.zeros((1, 64), jnp.int32).at[0, : len(tokens)].set(jnp.array(tokens))
        row = np.asarray(forward(loaded.model, padded, jnp.int32(len(tokens) - 1)))
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return tokens[len(prompt) :], logprobs


def live_blocks(real: Running) -> float:
    """What /metrics says."""
    text = httpx.get(f"{real.url}/metrics", trust_env=False).text
    [line] = [line for line in text.splitlines() if line.startswith('jaxkv_blocks{state="live"}')]
    return float(line.split()[-1])


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_until_free(real: Running) -> None:
    """Waits until no sequence holds a block."""
    wait_until(lambda: live_blocks(real) == 0)


def test_completion_is_the_models_greedy_text_with_its_logprobs(
    client: openai.OpenAI, loaded: LoadedModel
) -> None:
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(PROMPT)
    tokens, logprobs = greedy(loaded, ids, 12)
    answer = complete(client, logprobs=0)
    [choice] = answer.choices
    text = loaded.tokenizer.decode(tokens)
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert choice.logprobs.tokens == [loaded.tokenizer.decode([token]) for token in tokens]
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    starts = [len("".join(choice.logprobs.tokens[:i])) for i in range(len(tokens))]
    assert choice.logprobs.text_offset == starts
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 12)
    assert usage.total_tokens == len(ids) + 12
    many = complete(client, [ids, ids[:5], ids])
    assert [c.index for c in many.choices] == [0, 1, 2]
    assert many.choices[0].text == many.choices[2].text == text
    assert many.usage.prompt_tokens == 2 * len(ids) + 5
    assert complete(client, [PROMPT], max_tokens=12).usage.prompt_tokens_details.cached_tokens > 0
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_stream_joined_is_the_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 1.2, "seed": 7, "logprobs": 0}
    whole = complete(client, **fields)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert len(chunks) > 4
    assert len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        logprobs = [value for part in parts for value in part.logprobs.token_logprobs]
        assert logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        offsets = [value for part in parts for value in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset


def test_seed_makes_samples_repeatable_and_different(client: openai.OpenAI) -> None:
    def texts(**fields: Any) -> list[str]:
        return [
            c.text for c in complete(client, n=2, max_tokens=20, temperature=1.5, **fields).choices
        ]

    first = texts(seed=11)
    assert first == texts(seed=11)
    assert first[0] != first[1]
    assert first != texts(seed=12)
    assert texts() != texts()


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=30).choices[0].text
    stop = text[len(text) // 2 :][:6]
    answer = complete(client, max_tokens=30, stop=[stop, "\x00"])
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert answer.usage.completion_tokens < 30
    chunks = complete(client, max_tokens=30, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_chat_stream_joined_is_the_whole(client: openai.OpenAI, loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    create: Any = client.chat.completions.create
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    whole = create(logprobs=True, max_completion_tokens=40, **fields)
    [choice] = whole.choices
    prompt = loaded.tokenizer.apply_chat_template(MESSAGES)
    ids = loaded.tokenizer.encode(prompt)
    by_hand = complete(client, prompt, max_tokens=40)
    assert (choice.message.role, choice.message.content) == ("assistant", by_hand.choices[0].text)
    assert choice.finish_reason == by_hand.choices[0].finish_reason
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(token.logprob <= 0 for token in choice.logprobs.content)
    assert bytes(choice.logprobs.content[0].bytes).decode() == choice.logprobs.content[0].token
    assert whole.usage.prompt_tokens == len(ids)
    with create(
        stream=True, max_tokens=40, stream_options={"include_usage": True}, **fields
    ) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="expected 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="logit_bias") as caught:
        complete(client, logit_bias={"5": 1})
    assert (caught.value.param, caught.value.code) == ("logit_bias", "unsupported_field")
    with pytest.raises(openai.BadRequestError, match="expected token ids in"):
        complete(client, [10**6])
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [5] * 300)
    assert caught.value.code == "context_length_exceeded"


def test_fifty_clients_at_once_get_what_each_gets_alone(
    real: Running, client: openai.OpenAI, loaded: LoadedModel
) -> None:
    """P2, P3, P4, P5, P7: four sequences at a time share a pool for two; they preempt each other and nobody sees it."""
    names = ("Tom", "Lily", "Max", "Anna", "the dog")
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 70, "logprobs": 0}
    fields |= {"extra_body": {"ignore_eos": True}}
    alone = [
        client.completions.create(model="tiny", prompt=f"One day {name}", **fields).choices[0]
        for name in names
    ]
    before = real.engine.engine.stats.num_preemptions

    async def everybody() -> list[Any]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{real.url}/v1", api_key="any", max_retries=0, timeout=120, http_client=http
        ) as many:
            ask = many.completions.create
            return await asyncio.gather(
                *(
                    ask(
                        model="tiny",
                        prompt=f"One day {names[i % 5]}",
                        n=3 if i == 0 else 1,
                        **fields,
                    )
                    for i in range(10)
                ),
                *(
                    ask(model="tiny", prompt=f"One day {names[i % 5]}", max_tokens=6, temperature=0)
                    for i in range(40)
                ),
            )

    answers = asyncio.run(everybody())
    assert real.engine.engine.stats.num_preemptions > before
    for i, answer in enumerate(answers):
        expected = alone[i % 5]
        for choice in answer.choices:
            if i >= 10:
                assert expected.text.startswith(choice.text)
                continue
            assert choice.text == expected.text
            assert choice.logprobs.token_logprobs == pytest.approx(
                expected.logprobs.token_logprobs, abs=1e-3
            )
            assert len(choice.logprobs.tokens) == 70
        assert answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens
    assert len(answers[0].choices) == 3
    text = httpx.get(f"{real.url}/metrics", trust_env=False).text
    assert (
        real.engine.engine.stats.resumed_tokens > 0
    )  # found again by sequences that went on, and no hits
    assert float(re.findall(r"^jaxkv_hit_rate (\S+)$", text, re.MULTILINE)[0]) < 1
    wait_until_free(real)


def test_request_larger_than_the_pool_fails_and_a_small_one_completes(
    real: Running, client: openai.OpenAI
) -> None:
    """P1: 8 + 200 tokens need 26 blocks, the pool has 24."""
    with pytest.raises(openai.BadRequestError, match="need 26 blocks") as caught:
        complete(client, [5] * 8, max_tokens=200)
    assert caught.value.code == "capacity_exceeded"
    assert complete(client, [5] * 8, max_tokens=4).usage.completion_tokens == 4
    wait_until_free(real)


def test_prompt_shorter_than_what_is_cached_of_it_computes_its_last_block(
    real: Running, client: openai.OpenAI
) -> None:
    """P6: 96 tokens are cached, the prompt has 64 of them: 56 are found, 8 computed, never 64 - 96."""
    ids = [7 + 3 * i % 50 for i in range(80)]
    complete(client, ids, max_tokens=24, ignore_eos=True)
    found, fresh = complete(client, ids[:64]), complete(client, ids[:64], cache_salt="another")
    usages = [answer.usage for answer in (found, fresh)]
    assert [usage.prompt_tokens for usage in usages] == [64, 64]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [56, 0]
    assert found.choices[0].text == fresh.choices[0].text
    wait_until_free(real)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_midway_give_their_blocks_back(
    real: Running, client: openai.OpenAI, stream: bool
) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 170, "n": 4}
    fields |= {"ignore_eos": True, "stream": stream}
    submitted = real.engine.engine.stats.num_submitted

    def leave() -> None:
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        address = ("127.0.0.1", int(real.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(head.encode() + body)
            if stream:
                assert b"200 OK" in connection.recv(64)
            else:
                wait_until(lambda: real.engine.engine.stats.num_submitted == submitted + 3)

    threads = [threading.Thread(target=leave) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until_free(real)
    stats = real.engine.engine.stats
    assert stats.num_submitted == submitted + 3
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert complete(client).usage.completion_tokens == 12


def test_metrics_count_what_happened(real: Running, client: openai.OpenAI) -> None:
    list(complete(client, stream=True))
    complete(client)
    text = httpx.get(f"{real.url}/metrics", trust_env=False).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    stats = real.engine.engine.stats
    assert float(values["jaxkv_new_tokens_total"]) == stats.new_tokens > 0
    assert 0 < float(values["jaxkv_hit_rate"]) < 1
    blocks = [
        float(values[f'jaxkv_blocks{{state="{state}"}}']) for state in ("free", "cached", "live")
    ]
    assert sum(blocks) == 24
    assert float(values["jaxkv_in_flight"]) == float(values["jaxkv_waiting"]) == 0
    for name in ("first_token", "between_tokens", "request"):
        assert float(values[f"jaxkv_{name}_seconds_count"]) > 0
        assert math.isfinite(float(values[f"jaxkv_{name}_seconds_sum"]))
    answered = 'jaxkv_http_answers_total{endpoint="/v1/completions",status="200"}'
    assert float(values[answered]) > 0


def test_serving_page_example_runs_and_every_field_is_named(
    real: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    named = {*COMPLETION_FIELDS, *CHAT_FIELDS, *HARMLESS, *NEUTRAL}
    assert {field for field in named if f"`{field}`" not in text} == {"stream_options"}
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert "http://127.0.0.1:8000" in example
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    scope: dict[str, Any] = {}
    exec(example.replace("http://127.0.0.1:8000", real.url), scope)
    assert scope["answer"].usage.completion_tokens <= 40
    scope["client"].close()
