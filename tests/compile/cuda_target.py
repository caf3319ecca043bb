"""Compiles JAX programs for CUDA devices that are not there, and reads what the compilers made of them.

Invariants:
  * Nothing here touches a GPU: XLA gets the description of the device as text, `ptxas` and `nvdisasm` (packages
    nvidia-cuda-nvcc and nvidia-cuda-nvdisasm) read the PTX that XLA wrote.
  * Every figure belongs to one compiled module: launches, grids and shared memory come from its thunk sequence,
    registers and spills from `ptxas -v`, instruction counts from the disassembly.

Use::

    program = compile_for(TARGETS["sm_90"], fn, args, donate_argnums=(0,))
    program.launches                 # kernels and copies, in order
    program.memory.temp_size_in_bytes
    program.kernel("paged_attention").registers

Nothing is timed and nothing is autotuned, so the choices XLA makes for its own fusions are its defaults.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache} clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
runtime_version {{ major: 13 minor: 0 patch: 0 }} platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class CudaTarget:
    """A GPU as its data sheet describes it.

    Attributes:
      arch: the name used in metrics, "sm_90".
      name: the product.
      major, minor: compute capability.
      cores: streaming multiprocessors.
      fpus: float32 lanes of one of them.
      shared_per_core, shared_per_block: bytes of shared memory, of one multiprocessor and at most of one block.
      bandwidth: bytes a second of device memory.
      l2_cache, memory: bytes.
      clock_ghz: boost clock.
    """

    arch: str
    name: str
    major: int
    minor: int
    cores: int
    fpus: int
    shared_per_core: int
    shared_per_block: int
    bandwidth: int
    l2_cache: int
    memory: int
    clock_ghz: float

    @property
    def config(self) -> str:
        """The GpuTargetConfigProto of this device in text form."""
        return _CONFIG.format(**dataclasses.asdict(self))

    def blocks_per_core(self, kernel: KernelStats) -> int:
        """Thread blocks of `kernel` that fit one multiprocessor at once (registers, shared memory, threads)."""
        warps = -(-kernel.threads // 32)
        # A warp gets registers in units of 256.
        registers = -(-kernel.registers * 32 // 256) * 256 * warps
        shared = kernel.shared_bytes + 1024  # the driver keeps 1 KiB a block
        return min(
            65536 // max(registers, 1), self.shared_per_core // shared, 2048 // (32 * warps), 32
        )


TARGETS = {
    target.arch: target
    for target in (
        CudaTarget(
            "sm_80", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 64, 167936, 166912, 2_039_000_000_000,
            41_943_040, 85_097_971_712, 1.41,
        ),
        CudaTarget(
            "sm_90", "NVIDIA H200", 9, 0, 132, 128, 233472, 232448, 4_800_000_000_000,
            62_914_560, 150_754_820_096, 1.98,
        ),
        CudaTarget(
            "sm_100", "NVIDIA B200", 10, 0, 148, 128, 233472, 232448, 8_000_000_000_000,
            132_120_576, 191_503_138_816, 1.965,
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Launch:
    """One step of the compiled program that reaches the device.

    Attributes:
      kind: XLA's name of the thunk: kCustomKernel, kKernel, kCopy, kMemzero, kGemm...
      name: kernel name, "" for copies.
      grid, threads: launch dimensions (a copy has none).
      shared_bytes: dynamic shared memory.
      depth: how many loops it sits in.
    """

    kind: str
    name: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    depth: int


@dataclasses.dataclass(frozen=True)
class KernelStats:
    """What ptxas and the disassembler say about one kernel.

    Attributes:
      name: kernel name in the module.
      threads: threads of a block.
      registers: of one thread.
      spill_bytes: bytes of spill stores and loads in the code of one thread.
      stack_bytes: local memory of a thread.
      shared_bytes: static plus dynamic shared memory of a block.
      cubin: what ptxas made of `ptx`.
      ptx: the PTX text of the module the kernel is in.
    """

    name: str
    threads: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    cubin: bytes = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)

    @functools.cached_property
    def instructions(self) -> collections.Counter[str]:
        """SASS opcodes with all their suffixes, counted; empty without nvdisasm, which runs when first asked."""
        if not tool("nvdisasm").exists():
            return collections.Counter()
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(tool("nvdisasm")), "-c", "-ndf", file.name]
            sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return count_opcodes(sass, self.name)

    @property
    def copy_widths(self) -> collections.Counter[int]:
        """Bytes of an asynchronous copy (global to shared memory) -> how many are in the PTX."""
        sizes = re.findall(r"cp\.async\.c[ag]\.shared\S*\s+\[[^]]*\], \[[^]]*\], (\w+)", self.ptx)
        return collections.Counter(int(size, 0) for size in sizes)

    @property
    def tensor_core_ptx(self) -> int:
        """Matrix multiply instructions of the tensor cores in the PTX: warp, warp group, sm_100."""
        return len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", self.ptx))

    def count(self, pattern: str) -> int:
        """Instructions whose opcode matches the regular expression from its start."""
        return sum(n for opcode, n in self.instructions.items() if re.match(pattern, opcode))

    def load_widths(self) -> dict[int, int]:
        """Bits of a global load (to registers or straight to shared memory) -> how many are in the code."""
        widths: collections.Counter[int] = collections.Counter()
        for opcode, n in self.instructions.items():
            head, *suffixes = opcode.split(".")
            if head not in ("LDG", "LDGSTS"):
                continue
            narrow = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
            widths[next((narrow[s] for s in suffixes if s in narrow), 32)] += n
        return dict(widths)

    @property
    def tensor_core_instructions(self) -> int:
        """Matrix multiply instructions of the tensor cores: HMMA (warp), HGMMA (warp group), UTC*MMA (sm_100)."""
        return self.count(r"HMMA|HGMMA|QGMMA|IMMA|IGMMA|UTC.*MMA")


@dataclasses.dataclass(frozen=True)
class CudaProgram:
    """A compiled program and what it is made of."""

    target: CudaTarget
    compiled: Any
    launches: tuple[Launch, ...]
    ptx_files: tuple[str, ...] = dataclasses.field(repr=False)

    @property
    def memory(self) -> Any:
        """`CompiledMemoryStats`: argument, output, alias and temp bytes on the device."""
        return self.compiled.memory_analysis()

    def kernel(self, name: str) -> KernelStats:
        """Statistics of the kernel called `name`, or else of the one whose name starts so.

        Runs ptxas.

        Raises:
          LookupError: there is none, or there are several.
        """
        names = sorted({launch.name for launch in self.launches if launch.name.startswith(name)})
        if name not in names and len(names) != 1:
            raise LookupError(f"kernel {name}: expected one, got {names} of {self.launches}")
        name = name if name in names else names[0]
        entry = re.compile(rf"\.entry\s+{re.escape(name)}\s*\(")
        ptx = next(text for text in self.ptx_files if entry.search(text))
        launch = next(launch for launch in self.launches if launch.name == name)
        return kernel_stats(ptx, name, launch.threads, launch.shared_bytes)


def skip_reason() -> str | None:
    """Why programs cannot be compiled for CUDA here, or None when they can."""
    for module in ("jax_plugins.xla_cuda13", "nvidia.cu13"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"needs the package that brings {module} (jax-cuda13-plugin, nvidia-cuda-nvcc)"
    return None if tool("ptxas").exists() else "needs ptxas (package nvidia-cuda-nvcc)"


def tool(name: str) -> pathlib.Path:
    """Path of a CUDA command line tool among the installed packages (it may not exist)."""
    spec = importlib.util.find_spec("nvidia.cu13")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return pathlib.Path(roots[0] if roots else "/nonexistent") / "bin" / name


@functools.cache
def topology(target: CudaTarget, num_devices: int = 1) -> Any:
    """A topology of so many devices of the target, all in one host."""
    name = target.name.lower().replace(" ", "_")
    return topologies.get_topology_desc(
        name, "cuda", target_config=target.config, topology=f"1x{num_devices}x1"
    )


def on_target(target: CudaTarget, tree: Any) -> Any:
    """The same tree of arrays or ShapeDtypeStructs, as ShapeDtypeStructs placed on the target's device."""
    sharding = SingleDeviceSharding(topology(target).devices[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_for(
    target: CudaTarget,
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: Sequence[int] = (),
) -> CudaProgram:
    """Compiles `fn(*args)` for a target.

    Args:
      target: one of TARGETS.
      fn: a traceable function.
      args: pytrees of arrays or ShapeDtypeStructs.
      donate_argnums: arguments given up to the program, as in `jax.jit`.

    Returns:
      The program with its launches and PTX; the files XLA dumped are read and removed.
    """
    lowered = jax.jit(fn, donate_argnums=tuple(donate_argnums)).lower(
        *on_target(target, tuple(args))
    )
    with tempfile.TemporaryDirectory(prefix="jaxkv-cuda-") as folder:
        options = {
            "xla_dump_to": folder,
            "xla_gpu_autotune_level": "0",
            "xla_backend_optimization_level": "3",  # whatever conftest asks of CPU programs
        }
        compiled = lowered.compile(compiler_options=options)
        dump = pathlib.Path(folder)
        thunks = "".join(path.read_text() for path in sorted(dump.glob("*thunk_sequence.txt")))
        ptx = tuple(path.read_text() for path in sorted(dump.glob("*.ptx")))
    return CudaProgram(
        target, compiled, parse_launches(thunks), tuple(text for text in ptx if text)
    )


_THUNK = re.compile(r"^(?P<indent>\s*)\d{3,}: (?P<kind>k\w+)\s*\[[^\]]*\]\s*(?P<rest>.*)$")
_KERNEL = re.compile(
    r"(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\]\s+shared_memory: (?P<shared>\d+)"
)
_NO_LAUNCH = (
    "kWhile",
    "kConditional",
    "kSequential",
    "kCommandBuffer",
    "kAsyncStart",
    "kAsyncDone",
)


def parse_launches(thunks: str) -> tuple[Launch, ...]:
    """Reads XLA's dump of the thunk sequence; loops and branches themselves are no launches."""
    launches = []
    for line in thunks.splitlines():
        match = _THUNK.match(line)
        if not match or match["kind"] in _NO_LAUNCH:
            continue
        kernel = _KERNEL.search(match["rest"])
        depth = -(-len(match["indent"]) // 4)
        if kernel is None:
            launches.append(Launch(match["kind"], "", (), 0, 0, depth))
            continue
        grid = tuple(int(n) for n in kernel["grid"].split(","))
        threads = 1
        for n in kernel["threads"].split(","):
            threads *= int(n)
        launches.append(
            Launch(match["kind"], kernel["name"], grid, threads, int(kernel["shared"]), depth)
        )
    return tuple(launches)


def kernel_stats(ptx: str, name: str, threads: int, dynamic_shared: int) -> KernelStats:
    """Assembles `ptx` with the ptxas of the installed package and reads what it reports on `name`."""
    arch = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory(prefix="jaxkv-ptxas-") as folder:
        source, cubin = pathlib.Path(folder) / "kernel.ptx", pathlib.Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [str(tool("ptxas")), "-v", f"-arch={arch}", str(source), "-o", str(cubin)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        code = cubin.read_bytes()
    section = re.search(
        rf"entry function '{re.escape(name)}'.*?(?=Compiling entry|\Z)", report, re.DOTALL
    )[0]

    def figure(pattern: str) -> int:
        match = re.search(pattern, section)
        return int(match[1]) if match else 0

    return KernelStats(
        name=name,
        threads=threads,
        registers=figure(r"Used (\d+) registers"),
        spill_bytes=figure(r"(\d+) bytes spill stores") + figure(r"(\d+) bytes spill loads"),
        stack_bytes=figure(r"(\d+) bytes stack frame"),
        shared_bytes=figure(r"(\d+) bytes smem") + dynamic_shared,
        cubin=code,
        ptx=ptx,
    )


def count_opcodes(sass: str, name: str) -> collections.Counter[str]:
    """Opcodes of one kernel's section in the output of `nvdisasm -c`."""
    section = re.search(
        rf"\.section\s+\.text\.{re.escape(name)}[,\s].*?(?=\n\s*\.section\s|\Z)", sass, re.DOTALL
    )
    opcode = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
    return collections.Counter(opcode.findall(section[0]) if section else [])
