"""From the body of a request to what the engine is asked to do.

Invariants: a `Job` is complete: everything that can be refused without the engine has been; without a seed every prompt
gets a random one, so that temperature means something.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from jaxkv.namespace import Namespace
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams
from jaxkv.serve import errors
from jaxkv.serve.errors import bad_field
from jaxkv.serve.fields import Fields, check_text, is_ids, load_object, shown
from jaxkv.serve.options import Limits, Served

_COMMON = (
    "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "stream", "stream_options",
    "top_k", "min_p", "priority", "tenant", "cache_salt", "stop_token_ids", "ignore_eos",
)  # fmt: skip
COMPLETION_FIELDS = frozenset((*_COMMON, "prompt", "best_of"))
CHAT_FIELDS = frozenset((*_COMMON, "messages", "max_completion_tokens"))
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SEED_RANGE = 2**63


@dataclasses.dataclass(frozen=True)
class Job:
    """One HTTP request, checked.

    Attributes:
      requests: one per prompt, for the engine.
      num_samples: of each prompt.
      stream: answer in server-sent events.
      include_usage: end the stream with the usage.
      logprobs: say the chosen tokens' log-probabilities.
    """

    requests: tuple[Request, ...]
    num_samples: int
    stream: bool
    include_usage: bool
    logprobs: bool

    @property
    def num_choices(self) -> int:
        """Sequences that the answer holds."""
        return len(self.requests) * self.num_samples


def parse_completion(body: bytes, served: Served, limits: Limits) -> Job:
    """Returns the job of a body of /v1/completions.

    Raises:
      APIError: it is malformed, asks for what is not supported, or is beyond a limit.
    """
    fields = Fields(load_object(body), COMPLETION_FIELDS)
    _check_model(fields, served)
    if "best_of" in fields and fields.get("best_of") != (fields.get("n") or 1):
        fields.refuse("best_of", "the value of n (choosing among more is not supported)")
    if "logprobs" in fields and fields.integer("logprobs") != 0:
        fields.refuse("logprobs", "0 (the chosen token's; those of others are not supported)")
    prompts = _prompts(fields, served, limits)
    max_tokens = fields.integer("max_tokens", COMPLETION_TOKENS, low=1)
    return _job(fields, served, limits, prompts, max_tokens, "logprobs" in fields)


def parse_chat(body: bytes, served: Served, limits: Limits) -> Job:
    """Returns the job of a body of /v1/chat/completions; without max_tokens the answer may fill the sequence.

    Raises:
      APIError: see `parse_completion`; also a model without a chat template.
    """
    fields = Fields(load_object(body), CHAT_FIELDS)
    _check_model(fields, served)
    logprobs = fields.boolean("logprobs")
    prompt = _chat_prompt(fields, served)
    given = {
        name: fields.integer(name, low=1)
        for name in ("max_tokens", "max_completion_tokens")
        if name in fields
    }
    if len(set(given.values())) > 1:
        fields.refuse(
            "max_completion_tokens", f"the value of max_tokens, {given['max_tokens']}, or only one"
        )
    room = min(served.max_len, served.pool_tokens) - len(prompt)
    max_tokens = next(iter(given.values()), max(1, room))
    return _job(fields, served, limits, [prompt], max_tokens, logprobs)


def _check_model(fields: Fields, served: Served) -> None:
    name = fields.string("model")
    if name is None:
        fields.refuse("model", f"{served.name!r}")
    if name != served.name:
        raise errors.unknown_model(name, served.name)


def _job(
    fields: Fields,
    served: Served,
    limits: Limits,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: bool,
) -> Job:
    """Puts prompts and the fields that both endpoints share together."""
    source = "messages" if "messages" in fields else "prompt"
    for prompt in prompts:
        _check_length(len(prompt), max_tokens, served, limits, source)
    num_samples = fields.integer("n", 1, low=1)
    if num_samples > limits.max_n:
        raise bad_field("n", f"expected at most {limits.max_n}, got {num_samples}")
    if num_samples * len(prompts) > limits.max_queue:
        raise bad_field("n", f"expected at most {limits.max_queue} sequences in all")
    stream = fields.boolean("stream")
    options = _stream_options(fields, stream)
    stop = fields.strings("stop", limits.max_stops)
    stop_ids = fields.integers("stop_token_ids")
    try:
        namespace = Namespace(
            tenant=fields.integer("tenant", 0),
            salt=fields.string("cache_salt"),
            format=served.kv_format,
        )
        requests = tuple(
            Request(
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=_sampling(fields),
                stop_ids=stop_ids,
                stop=stop,
                num_samples=num_samples,
                namespace=namespace,
                priority=fields.integer("priority", 0, low=-(2**31)),
                ignore_eos=fields.boolean("ignore_eos"),
            )
            for prompt in prompts
        )
    except ValueError as error:
        raise errors.from_value(error) from error
    return Job(requests, num_samples, stream, options, logprobs)


def _check_length(
    prompt_len: int, max_tokens: int, served: Served, limits: Limits, source: str
) -> None:
    """Refuses an empty prompt, and one that is too long by itself or with its answer."""
    if prompt_len == 0:
        raise bad_field(source, "expected at least one token, got none")
    if limits.max_prompt_len is not None and prompt_len > limits.max_prompt_len:
        raise bad_field(
            source,
            f"expected at most {limits.max_prompt_len} tokens, got {prompt_len}",
            "context_length_exceeded",
        )
    if prompt_len + max_tokens > served.max_len:
        raise errors.too_long(prompt_len, max_tokens, served.max_len, source)


def _sampling(fields: Fields) -> SamplingParams:
    """Returns how tokens are drawn; a seed outside [0, 2**32) counts modulo 2**32.

    Raises:
      ValueError: a value out of range.
    """
    seed = fields.integer("seed", None, low=-_SEED_RANGE, high=_SEED_RANGE - 1)
    return SamplingParams(
        temperature=fields.number("temperature", 1.0),
        top_k=fields.integer("top_k", 0),
        top_p=fields.number("top_p", 1.0),
        min_p=fields.number("min_p", 0.0),
        seed=secrets.randbits(32) if seed is None else seed % 2**32,
    )


def _stream_options(fields: Fields, stream: bool) -> bool:
    """Returns whether the stream is to end with the usage."""
    if "stream_options" not in fields:
        return False
    options = fields.get("stream_options")
    if not stream:
        fields.refuse("stream_options", "nothing without stream")
    if not isinstance(options, dict) or not set(options) <= {
        "include_usage",
        "include_obfuscation",
    }:
        fields.refuse("stream_options", 'an object such as {"include_usage": true}')
    if not all(isinstance(value, (bool, type(None))) for value in options.values()):
        fields.refuse("stream_options", "true or false in its fields")
    return bool(options.get("include_usage"))


# Prompts ------------------------------------------------------------------------------------------


def _prompts(fields: Fields, served: Served, limits: Limits) -> list[list[int]]:
    """Returns the token ids of a string, a list of strings, a list of ids or a list of lists of ids."""
    value = fields.get("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and is_ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        fields.refuse("prompt", "a string, token ids, or a list of either")
    if len(value) > limits.max_prompts:
        raise bad_field(
            "prompt", f"expected at most {limits.max_prompts} prompts, got {len(value)}"
        )
    if all(isinstance(prompt, str) for prompt in value):
        if served.tokenizer is None:
            fields.refuse("prompt", "token ids (the model has no tokenizer)")
        return [served.tokenizer.encode(check_text("prompt", prompt)) for prompt in value]
    if not all(is_ids(prompt) for prompt in value):
        fields.refuse("prompt", "a string, token ids, or a list of either")
    return value


def _chat_prompt(fields: Fields, served: Served) -> list[int]:
    """Returns the token ids of a conversation in the model's chat template."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        fields.refuse("messages", "a list of messages, not empty")
    if getattr(served.tokenizer, "chat_template", None) is None:
        raise bad_field(
            "messages",
            "expected a model with a chat template, got one without; use /v1/completions",
        )
    conversation = [_message(i, message) for i, message in enumerate(messages)]
    try:
        text = served.tokenizer.apply_chat_template(conversation)
    except ValueError as error:
        raise bad_field("messages", f"the chat template refuses them: {error}") from error
    return served.tokenizer.encode(text, add_special_tokens=False)


def _message(index: int, message: Any) -> dict[str, str]:
    """Returns role and content of one message; the role "developer" is "system"."""
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise bad_field(name, f"expected an object, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_field(f"{name}.role", f"expected one of {sorted(_ROLES)}, got {shown(role)}")
    for key, value in message.items():
        if key not in ("role", "content", "name") and value not in (None, []):
            raise bad_field(f"{name}.{key}", f"not supported by this server, got {shown(value)}")
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(map(_is_text_part, parts)):
        raise bad_field(
            f"{name}.content", f"expected text or a list of text parts, got {shown(content)}"
        )
    text = "".join(part["text"] for part in parts)
    return {"role": _ROLES[role], "content": check_text(f"{name}.content", text)}


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and set(part) == {"type", "text"}
    )
