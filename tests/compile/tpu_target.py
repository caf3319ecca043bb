"""TPU compile targets without a TPU: topologies, abstract shapes and the abstract mesh Mosaic asks for.

REQUIRES: the package `libtpu`.  `available()` says why not, where it is absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing here touches a device, so processes need no lock
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU generation as a compile target.

    Attributes:
      name: what tests and benchmarks call it.
      topology: the smallest topology libtpu knows for it.
      device_kind: what a device of it calls itself; Mosaic reads this while lowering.
      num_cores: TensorCores a device shows.
    """

    name: str
    topology: str
    device_kind: str
    num_cores: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e:2x2", "TPU v5 lite", 1),
        Chip("v6e", "v6e:2x2", "TPU v6 lite", 1),
        Chip("v5p", "v5p:2x2x1", "TPU v5", 2),
    )
}


def available() -> str | None:
    """Returns None where TPU programs can be compiled, else the reason why not."""
    return None if importlib.util.find_spec("libtpu") else "the package libtpu is not installed"


@functools.cache
def devices(chip: Chip):
    """Returns the devices of the topology of `chip`, four of them; the only place that starts libtpu."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices


def abstract(chip: Chip, tree):
    """Returns `tree` with every array (or ShapeDtypeStruct) as a ShapeDtypeStruct placed on `chip`."""
    sharding = SingleDeviceSharding(devices(chip)[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding), tree
    )


@contextlib.contextmanager
def lowering_for(chip: Chip):
    """Lets Mosaic know which TPU it lowers for while this machine has none."""
    device = AbstractDevice(device_kind=chip.device_kind, num_cores=chip.num_cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def compile_for(chip: Chip, function, *args, donate: tuple[int, ...] = ()):
    """Returns `function` compiled by libtpu for `chip`; `args` are arrays or ShapeDtypeStructs.

    Args:
      chip: the target.
      function: traced under jit.
      *args: pytrees; only their shapes and dtypes count.
      donate: positions of arguments the program may update in place.
    """
    with lowering_for(chip):
        lowered = jax.jit(function, donate_argnums=donate).lower(*abstract(chip, args))
    return lowered.compile(
        {"xla_backend_optimization_level": 3}
    )  # whatever conftest asks of CPU programs
