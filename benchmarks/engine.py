"""The engine on SmolLM2-135M: host time, a mixed workload beside transformers and a static batch, and speculation.

Needs torch, transformers, accelerate and gguf, and the model's file (see `cpu_decode.model_path`).  All sides are greedy,
float32, on the same cores; ratios are their time over the engine's.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import cpu_decode
import harness
import numpy as np

from jaxkv import CacheConfig
from jaxkv.engine import Engine
from jaxkv.generate import Generator
from jaxkv.request import Request
from jaxkv.workload import ServingReport, mixed_requests, serve_all
from models.qwen import load

MAX_STEPS, BLOCK = 16, 16
HOST_SEQS, SLOTS = 16, 32  # of the host's share, of the throughput
THEIR_BATCH = 16  # padded; all 64 in one batch take as long
PROMPT_LENS, MAX_TOKENS = (16, 512), (16, 256)
SHAPES = {"threads": cpu_decode.threads()}


def make_engine(model: Any, max_seqs: int, max_seq_len: int = 768, **options: Any) -> Engine:
    """Returns an engine, warmed up, whose pool holds every slot at its longest."""
    config = model.config
    blocks = max_seq_len // BLOCK
    cache = CacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK,
        num_blocks=max_seqs * blocks,
        max_seqs=max_seqs,
        max_blocks_per_seq=blocks,
    )
    engine = Engine(model, cache, max_steps=MAX_STEPS, **options)
    engine.warm_up()
    return engine


def host_share(engine: Engine, vocab: int) -> harness.Result:
    """16 sequences decode 64 tokens each, K 16: what share of the wall time is the host's own?"""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, vocab, (HOST_SEQS, 64)).tolist()
    run = serve_all(engine, [Request(p, max_tokens=64, ignore_eos=True) for p in prompts])
    return harness.Result(
        metric="engine.host_share",
        value=run.host_share,
        unit="of wall time",
        shapes=SHAPES
        | {"seqs": HOST_SEQS, "new_tokens": run.new_tokens, "steps_per_dispatch": MAX_STEPS},
        limit=0.05,
    )


def static_batches(model: Any, requests: list[Request], engine: Engine) -> float:
    """Serves as many requests at a time as the engine has slots, each batch until its last one ends; returns seconds."""
    generator = Generator(model, engine.config, prefill_chunk=64, steps_per_dispatch=MAX_STEPS)
    seconds = 0.0
    for i in range(0, len(requests), SLOTS):
        batch = requests[i : i + SLOTS]
        most = max(request.max_tokens for request in batch)
        begin = time.perf_counter()
        generator.generate([request.prompt for request in batch], max_new_tokens=most)
        # The width of the token buffer is a shape: every batch compiles, which is not what is compared here.
        seconds += time.perf_counter() - begin - generator.stats.compile_s
    return seconds


class Transformers:
    """Padded `generate`, and its continuous batching."""

    def __init__(self) -> None:
        path = cpu_decode.model_path()
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(cpu_decode.threads())
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def padded(self, requests: list[Request]) -> float:
        """Returns seconds; each batch runs until its last request ends."""
        torch = self.torch
        begin = time.perf_counter()
        for i in range(0, len(requests), THEIR_BATCH):
            batch = requests[i : i + THEIR_BATCH]
            width = max(len(request.prompt) for request in batch)
            ids = torch.zeros((len(batch), width), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
                mask[row, width - len(request.prompt) :] = 1
            most = max(request.max_tokens for request in batch)
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=most,
                    min_new_tokens=most,
                    do_sample=False,
                    pad_token_id=0,
                )
        return time.perf_counter() - begin

    def continuous(self, requests: list[Request]) -> float:
        """Returns seconds of its continuous batching.

        Raises:
          Exception: whatever it raises on a machine or version that it does not run on.
        """
        longest = max(request.max_tokens for request in requests)
        config = self.transformers.GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        self.model.generation_config.max_new_tokens = longest
        begin = time.perf_counter()
        self.model.generate_batch(
            [list(request.prompt) for request in requests], generation_config=config
        )
        return time.perf_counter() - begin


def throughput(model: Any, num_requests: int) -> list[harness.Result]:
    """Mixed requests through the engine, a static batch and transformers, in turn."""
    engine = make_engine(model, SLOTS)
    requests = mixed_requests(
        model.config.vocab_size, num_requests, prompt_lens=PROMPT_LENS, max_tokens=MAX_TOKENS
    )
    theirs = Transformers()
    run = serve_all(engine, requests)
    # A file of requests can be sorted by length first, and whoever knew the answers' lengths could batch equal ones;
    # nobody can who serves.
    others = {
        "static_batch": static_batches(model, requests, engine),
        "hf_padded": theirs.padded(requests),
        "hf_padded_sorted_by_prompt": theirs.padded(
            sorted(requests, key=lambda request: len(request.prompt))
        ),
        "hf_padded_sorted_by_answer": theirs.padded(
            sorted(requests, key=lambda request: request.max_tokens)
        ),
    }
    shapes = SHAPES | {"slots": SLOTS, "requests": num_requests, "new_tokens": run.new_tokens}
    latencies = {
        name: run.percentiles(name) for name in ("first_token_s", "between_tokens_s", "request_s")
    }
    results = [
        harness.Result(
            "engine.tokens_per_s",
            run.tokens_per_s,
            "tokens/s",
            shapes | {"latency": str(latencies)},
        ),
        fastest_of_theirs(theirs, model.config.vocab_size),
    ]
    for name, seconds in others.items():
        results.append(_versus(f"engine.vs_{name}", run, seconds, shapes))
    return results


def fastest_of_theirs(theirs: Transformers, vocab: int) -> harness.Result:
    """8 requests of 16 tokens each, so that nothing is padded away: which of transformers' two ways is the one to beat?"""
    requests = mixed_requests(vocab, 8, prompt_lens=(16, 64), max_tokens=(16, 16))
    padded, continuous = theirs.padded(requests), theirs.continuous(requests)
    return harness.Result(
        metric="engine.hf_continuous_over_padded",
        value=continuous / padded,
        unit="times the seconds",
        shapes={"requests": len(requests), "threads": cpu_decode.threads()},
        versus="seconds padded, continuous",
        versus_value=padded,
        ratio=continuous / padded,
    )


def _versus(
    metric: str, run: ServingReport, seconds: float, shapes: dict[str, Any]
) -> harness.Result:
    return harness.Result(
        metric=metric,
        value=seconds / run.wall_s,
        unit="times as fast",
        shapes=shapes,
        versus="its seconds, ours",
        versus_value=seconds,
        ratio=seconds / run.wall_s,
        least=1.5,
    )


def speculation(loaded: Any, model: Any, plain: Engine) -> list[harness.Result]:
    """Greedy continuations with and without prompt-lookup drafts: a text with repetition, and one without."""
    drafts = make_engine(model, HOST_SEQS, draft_len=4)
    passage = pydoc_data.topics.topics["while"][:600]
    texts = {
        "repetition": f"{passage}\n\nThe same text again:\n\n{passage[:200]}",
        "none": "My favourite food is",
    }
    results = []
    for name, text in texts.items():
        prompt = loaded.tokenizer.encode(text)
        outputs, seconds, accepted = [], [], 0
        for engine in (plain, drafts):
            before = engine.stats.num_accepted
            begin = time.perf_counter()
            handle = engine.submit(Request(prompt, max_tokens=96, ignore_eos=True))
            engine.run_until_idle()
            seconds.append(time.perf_counter() - begin)
            outputs.append(handle.outputs[0].tokens)
            accepted = engine.stats.num_accepted - before
        if outputs[0] != outputs[1]:
            raise AssertionError(f"{name}: drafts changed the tokens")
        results.append(
            harness.Result(
                metric=f"engine.speculation.{name}",
                value=len(outputs[0]) - accepted,
                unit="steps",
                shapes={"new_tokens": len(outputs[0]), "draft_len": 4},
                versus="steps without drafts",
                versus_value=len(outputs[0]),
                ratio=seconds[0] / seconds[1],
            )
        )
    return results


def run(quick: bool) -> list[harness.Result]:
    """Returns the host's share, the throughput ratios and the steps that drafts save."""
    loaded = load(cpu_decode.model_path())
    model = loaded.model.spread()
    engine = make_engine(model, HOST_SEQS)
    results = [host_share(engine, model.config.vocab_size)]
    results += speculation(loaded, model, engine)
    return results + throughput(model, 16 if quick else 64)


if __name__ == "__main__":
    harness.main(__doc__.splitlines()[0], run)
