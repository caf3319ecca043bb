"""Decode on CPU: SmolLM2-135M through the paged cache, beside transformers on the same machine and threads.

Needs torch, transformers, accelerate and gguf, and the model's file (see `model_path`).  The ratio is transformers'
time over ours: at least 1.7 against `generate`, 1.3 against a bare loop over the forward.  Where there are several cores
the model is divided over as many CPU devices (`jaxkv.mesh`), one thread each.  What it gave: `results/cpu_decode.md`.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bar while it reads the file

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import CacheConfig, decode_loop
from jaxkv.format_bytes import default_block_size
from jaxkv.mesh import device_config, init_on, make_mesh, mesh_of, mesh_shape, specs_of, spmd
from jaxkv.sampling import SamplingParams, sampling_state
from models.qwen import Qwen, load, shard
from pallas_kernels.sealed import SEALED_FORMATS

NUM_SEQS, CONTEXT_LEN, STEPS, CHUNK = 8, 1024, 8, 256
WARM_UP_STEPS = 2
LEAST = {"generate": 1.7, "forward": 1.3}  # transformers' time over ours


def threads() -> int:
    """Returns the number of cores this process may use; both sides then use as many (pin with `taskset`)."""
    return len(os.sched_getaffinity(0))


def prompts(vocab: int) -> np.ndarray:
    """Returns i32[seq, CONTEXT_LEN] of arbitrary ids: decode costs the same for any text."""
    return np.random.default_rng(0).integers(0, vocab, (NUM_SEQS, CONTEXT_LEN), dtype=np.int32)


def on_all_cores(model: Qwen) -> Qwen:
    """Returns the model divided over one CPU device a core; itself where there is one core."""
    if threads() == 1:
        return model
    return shard(model, make_mesh(*mesh_shape(model.config.num_kv_heads, threads())))


class Ours:
    """The jitted loop of jaxkv, its sequences prefilled to CONTEXT_LEN tokens, where the model is."""

    def __init__(self, model: Any, total_steps: int, format: str = "float32") -> None:
        self.model = model
        config = self.model.config
        block_size = default_block_size(format)
        blocks = -(-(CONTEXT_LEN + total_steps + 1) // block_size)
        self.mesh = mesh_of(model)
        self.cache_config = CacheConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            num_blocks=NUM_SEQS * blocks,
            max_seqs=NUM_SEQS,
            max_blocks_per_seq=blocks,
            format=format,
        )
        self.device_config = device_config(self.cache_config, self.mesh)

        def init(model: Any, sampling: Any) -> Any:
            limits = jnp.full(NUM_SEQS, total_steps + 1, jnp.int32)
            rest = limits, jnp.array([], jnp.int32), total_steps + 1
            return decode_loop.init_state(self.device_config, model, sampling, *rest)

        sampling = sampling_state([SamplingParams()] * NUM_SEQS, [0] * NUM_SEQS)
        self.state = init_on(self.mesh, init, model, sampling)
        self._prefill(prompts(config.vocab_size))
        self.program = self._compile(decode_loop.decode, jnp.int32(STEPS))

    def _compile(self, step: Callable[..., Any], *args: Any) -> harness.Compiled:
        function = functools.partial(step, self.device_config)
        called = self.model, self.state, *args
        function = spmd(function, self.mesh, called, specs_of(self.state))
        return harness.compile_program(function, self.model, self.state, *args, donate=[1])

    def _prefill(self, tokens: np.ndarray) -> None:
        q_lens = jnp.full(NUM_SEQS, CHUNK, jnp.int32)
        prefill = self._compile(decode_loop.prefill, jnp.asarray(tokens[:, :CHUNK]), q_lens)
        for begin in range(0, CONTEXT_LEN, CHUNK):
            chunk = jnp.asarray(tokens[:, begin : begin + CHUNK])
            self.state = prefill.call(self.model, self.state, chunk, q_lens)
        source = jnp.arange(NUM_SEQS, dtype=jnp.int32)
        self.state = self._compile(decode_loop.start, source).call(self.model, self.state, source)

    def steps(self) -> Any:
        """Decodes STEPS tokens of every sequence in one dispatch."""
        self.state = self.program.call(self.model, self.state, jnp.int32(STEPS))
        return self.state

    def bytes_per_step(self) -> int:
        """Returns the bytes a step has to read: all weights, and the KV of CONTEXT_LEN tokens of each row."""
        layout = self.cache_config.layout
        per_token = layout.nbytes / (layout.num_blocks * layout.block_size)
        return harness.tree_bytes(self.model) + round(NUM_SEQS * CONTEXT_LEN * per_token)


class Transformers:
    """The same model in transformers: a bare loop over its forward, and its `generate`."""

    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads())
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.cache_type = transformers.DynamicCache
        self.tokens = torch.from_numpy(prompts(self.model.config.vocab_size)).long()
        with torch.inference_mode():
            self.cache = self.cache_type(config=self.model.config)
            out = self._forward(self.tokens)
            self.last = out.logits[:, -1:].argmax(-1)
        self.first = self.last.numpy()[:, 0].copy()

    def _forward(self, tokens: Any) -> Any:
        return self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def forward_steps(self) -> None:
        """Decodes STEPS tokens with nothing around the forward."""
        with self.torch.inference_mode():
            for _ in range(STEPS):
                self.last = self._forward(self.last).logits[:, -1:].argmax(-1)

    def generate_seconds(self, rounds: int) -> list[float]:
        """Returns what STEPS tokens of `generate` take, `rounds` times in one run after its prefill."""
        ticks: list[float] = []

        def tick(ids: Any, scores: Any, **_: Any) -> Any:
            ticks.append(time.perf_counter())
            return self.torch.zeros(len(ids), dtype=self.torch.bool)

        with self.torch.inference_mode():
            self.model.generate(
                self.tokens,
                attention_mask=self.torch.ones_like(self.tokens),
                max_new_tokens=1 + rounds * STEPS,
                min_new_tokens=1 + rounds * STEPS,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[tick],
            )
        ends = ticks[::STEPS]
        return [end - begin for begin, end in itertools.pairwise(ends)]


def copy_bandwidth() -> float:
    """Returns bytes read and written per second by a copy of 1 GiB in place, the best of several.

    In place, as fresh pages would cost more than the copy; 1 GiB, as a step reads about as much, and no cache holds it.
    """
    copy = jax.jit(lambda x: x * 2, donate_argnums=0)
    buffer = copy(jnp.ones(2**28, jnp.float32))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        buffer = jax.block_until_ready(copy(buffer))
        times.append(time.perf_counter() - begin)
    return 2 * buffer.nbytes / min(times)


def model_path() -> Path:
    """Returns SmolLM2-135M's GGUF file: $JAXKV_SMOLLM2, or the copy the tests have fetched.

    Raises:
      FileNotFoundError: neither exists.
    """
    if "JAXKV_SMOLLM2" in os.environ:
        return Path(os.environ["JAXKV_SMOLLM2"])
    cache = Path(os.environ.get("JAXKV_TEST_CACHE", Path.home() / ".cache" / "jaxkv"))
    found = sorted(cache.rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not found:
        raise FileNotFoundError(
            f"SmolLM2-135M-Instruct.Q4_1.gguf: not under {cache}; run the tests marked realmodel, or set "
            "JAXKV_SMOLLM2"
        )
    return found[0]


def formats_beside_float32(model: Any, rounds: int) -> list[harness.Result]:
    """Times a step with each quantised format in turn with the float32 cache; a ratio above 1 is a faster step."""
    total = (WARM_UP_STEPS + rounds) * STEPS
    caches = {name: Ours(model, total, name) for name in ("float32", *SEALED_FORMATS)}
    for _ in range(WARM_UP_STEPS):
        for cache in caches.values():
            jax.block_until_ready(cache.steps())
    times = harness.alternate(rounds, *(cache.steps for cache in caches.values()))
    plain = statistics.median(times[0]) / STEPS
    results = []
    for name, seconds in zip(list(caches)[1:], times[1:], strict=True):
        step = statistics.median(seconds) / STEPS
        results.append(
            harness.Result(
                metric=f"cpu_decode.{name}_vs_float32",
                value=step * 1e3,
                unit="ms/step",
                shapes={"seqs": NUM_SEQS, "context": CONTEXT_LEN, "threads": threads()},
                versus="float32 cache",
                versus_value=plain * 1e3,
                ratio=plain / step,
                spread=tuple(q / STEPS * 1e3 for q in harness.middle_half(seconds)),
            )
        )
    return results


def run(quick: bool) -> list[harness.Result]:
    """Times decode steps in turn with transformers' and returns the ratios."""
    jax.config.update("jax_num_cpu_devices", threads())
    rounds, generate_rounds = (3, 1) if quick else (7, 3)
    path = model_path()
    model = load(path).model.spread()
    divided = on_all_cores(model)
    formats = formats_beside_float32(divided, rounds)
    total = (WARM_UP_STEPS + rounds + generate_rounds) * STEPS
    ours, alone = Ours(divided, total), Ours(model, total)
    theirs = Transformers(path)
    agree = int((np.asarray(ours.state.tokens[:, 0]) == theirs.first).sum())
    if agree < NUM_SEQS - 1:  # arbitrary ids give flat logits: one tie may break differently
        raise AssertionError(f"first tokens: {agree} of {NUM_SEQS} equal transformers'")
    for _ in range(WARM_UP_STEPS):
        for steps in (ours.steps, alone.steps, theirs.forward_steps):
            jax.block_until_ready(steps())
    mine, one_device, forward = harness.alternate(
        rounds, ours.steps, alone.steps, theirs.forward_steps
    )
    generate = theirs.generate_seconds(generate_rounds)
    mine += harness.alternate(generate_rounds, ours.steps)[0]

    step_s = statistics.median(mine) / STEPS
    floor_s = ours.bytes_per_step() / copy_bandwidth()
    shapes = {"seqs": NUM_SEQS, "context": CONTEXT_LEN, "threads": threads()}

    def times_as_fast(
        name: str, versus: str, times: list[float], least: float | None = None
    ) -> harness.Result:
        their_s = statistics.median(times) / STEPS
        return harness.Result(
            metric=f"cpu_decode.{name}",
            value=step_s * 1e3,
            unit="ms/step",
            shapes=shapes,
            versus=versus,
            versus_value=their_s * 1e3,
            ratio=their_s / step_s,
            spread=tuple(q / STEPS * 1e3 for q in harness.middle_half(mine)),
            limit=None if least is None else their_s / least * 1e3,
        )

    return [
        *formats,
        times_as_fast("vs_one_device", "jaxkv on one CPU device", one_device),
        times_as_fast("vs_hf_generate", "transformers", generate, LEAST["generate"]),
        times_as_fast("vs_hf_forward", "transformers", forward, LEAST["forward"]),
        harness.Result(
            metric="cpu_decode.floor_share",
            value=floor_s / step_s,
            unit="of the copy-bandwidth floor",
            shapes=shapes | {"read_bytes": ours.bytes_per_step()},
            versus="floor ms/step",
            versus_value=floor_s * 1e3,
        ),
        harness.Result(
            metric="cpu_decode.compile_s",
            value=ours.program.compile_s,
            unit="s",
            shapes=shapes | {"lower_s": round(ours.program.lower_s, 2)},
        ),
    ]


if __name__ == "__main__":
    harness.main(__doc__.splitlines()[0], run)
