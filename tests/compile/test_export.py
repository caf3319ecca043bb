"""One `jax.export` artifact of a whole generation for cpu, tpu and cuda: runs here, compiles for the others.

The artifact takes and returns flat leaves; whoever calls it keeps the tree structures.  So nothing needs to be
registered with `jax.export`, and the file depends on no class of this project.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile import cuda_target, tpu_target
from fast_compile import FAST_INTERPRET
from jax import export

from jaxkv import CacheConfig, decode_loop
from jaxkv.decode_loop import NO_TOKEN
from jaxkv.sampling import SamplingParams, sampling_state
from models import tiny
from models.qwen import load
from pallas_kernels import dispatch
from pallas_kernels.layout import decode

pytestmark = [
    pytest.mark.compile,
    # JAX 0.11 says at every lowering that its Triton backend will go; see test_cuda_triton.py.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
PLATFORMS = ("cpu", "tpu", "cuda")
# JAX vouches for TPU kernels in artifacts for half a year; of Triton kernels it wants to hear that we know.
CHECKS = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
TEXTS = ("Once upon a time", "The fox", "What colour is the sky? It is")
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.9, top_k=8, seed=3),
    SamplingParams(temperature=1.1, top_p=0.9, min_p=0.02, seed=4),
]
NEW = 20
CONFIG = CacheConfig(
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    num_blocks=1024,
    max_seqs=len(TEXTS),
    max_blocks_per_seq=6,
    format="bfloat16",
    as_bits=True,  # what the CPU wants, and the kernels of the others take
)


def generate(model: Any, state: Any, tokens: Any, q_lens: Any, steps: Any) -> Any:
    """The whole generation as one program: the prompts, the first tokens, then up to `steps` more."""
    state = decode_loop.prefill(CONFIG, model, state, tokens, q_lens)
    state = decode_loop.start(CONFIG, model, state, jnp.arange(CONFIG.max_seqs, dtype=jnp.int32))
    return decode_loop.decode(CONFIG, model, state, steps)


@functools.cache
def arguments() -> tuple[Any, ...]:
    """Returns the arguments of `generate`: the model that ships, three prompts, three ways to sample."""
    loaded = load(tiny.path())
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(text) for text in TEXTS]
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    state = decode_loop.init_state(
        CONFIG,
        loaded.model,
        sampling_state(SAMPLING, [0] * len(prompts)),
        jnp.full(len(prompts), NEW, jnp.int32),
        jnp.array(loaded.eos_token_ids, jnp.int32),
        NEW,
    )
    q_lens = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    return loaded.model, state, jnp.asarray(tokens), q_lens, jnp.int32(NEW)


@functools.cache
def artifact() -> export.Exported:
    """Returns `generate` after its way through bytes."""
    pytest.importorskip("flatbuffers", reason="jax.export writes its artifacts with flatbuffers")
    leaves, structure = jax.tree.flatten(arguments())

    def flat(*leaves: Any) -> Any:
        return jax.tree.leaves(generate(*jax.tree.unflatten(structure, leaves)))

    exported = export.export(jax.jit(flat), platforms=PLATFORMS, disabled_checks=CHECKS)(*leaves)
    return export.deserialize(exported.serialize())


def donated() -> tuple[int, ...]:
    """Returns the positions of the state among the leaves."""
    model, state, *_ = arguments()
    begin = len(jax.tree.leaves(model))
    return tuple(range(begin, begin + len(jax.tree.leaves(state))))


def test_artifact_for_three_platforms_gives_the_tokens_of_the_jitted_loop() -> None:
    assert artifact().platforms == PLATFORMS
    run = functools.partial(jax.jit, compiler_options=FAST_INTERPRET)
    leaves = run(artifact().call)(*jax.tree.leaves(arguments()))
    got = jax.tree.unflatten(jax.tree.structure(arguments()[1]), leaves)
    expected = run(generate)(*arguments())
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    assert np.all(got.num_tokens >= 1)
    assert np.array_equal(np.sum(np.asarray(got.tokens) != NO_TOKEN, axis=1), got.num_tokens)
    layout = expected.cache.store.layout
    pools = [np.asarray(decode(layout, s.cache.store.kv)) for s in (got, expected)]
    np.testing.assert_allclose(*pools, rtol=2**-7)  # two compilations may round one number apart


def test_artifact_compiles_for_tpu_with_its_pool_in_place() -> None:
    if tpu_target.available() is not None:
        pytest.skip(str(tpu_target.available()))
    leaves = jax.tree.leaves(arguments())
    compiled = tpu_target.compile_for(
        tpu_target.CHIPS["v5e"], artifact().call, *leaves, donate=donated()
    )
    check_in_place(compiled.memory_analysis())
    assert compiled.as_text().count("tpu_custom_call") >= 3


@pytest.mark.exhaustive  # the loop itself compiles for CUDA in test_generation_loop.py
def test_artifact_compiles_for_cuda_with_its_pool_in_place() -> None:
    if cuda_target.skip_reason() is not None:
        pytest.skip(str(cuda_target.skip_reason()))
    leaves = jax.tree.leaves(arguments())
    target = cuda_target.TARGETS["sm_90"]
    program = cuda_target.compile_for(target, artifact().call, leaves, donated())
    check_in_place(program.memory)
    names = {launch.name for launch in program.launches}
    assert {"write_kv", "paged_attention"} <= names


def check_in_place(memory: Any) -> None:
    """The pool is aliased and no copy of it, nor of one of its four layers, is among the temporaries."""
    pool_bytes = CONFIG.layout.nbytes
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / CONFIG.num_layers / 2


def test_export_for_a_platform_whose_kernel_refuses_names_the_reason() -> None:
    def refuse(x: Any) -> Any:
        raise NotImplementedError(f"width {x.shape[0]} on tpu: supported are others")

    kinds = {"tpu": refuse, "xla": lambda x: x + 1}
    call = jax.jit(lambda x: dispatch.run("auto", kinds, {"tpu": "tpu"}, "xla", x))
    assert export.export(call, platforms=("cpu", "cuda"))(jnp.ones(3)).platforms == ("cpu", "cuda")
    with pytest.raises(
        NotImplementedError, match=r"width 3 on tpu.*\"xla\" runs on every platform"
    ):
        export.export(call, platforms=PLATFORMS)(jnp.ones(3))
