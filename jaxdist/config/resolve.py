"""Values that a configuration leaves open, filled in: sizes of the mesh, the number of devices, the warm-up.

Nothing here imports jax.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config.rules.fields import show
from jaxdist.config.rules.pipeline import divisors
from jaxdist.errors import UserError

if TYPE_CHECKING:
    from jaxdist.config.schema import DevicesConfig, MeshConfig

SHRINK_ORDER = ("data", "fsdp", "tensor", "context", "expert", "pipe")
GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
INSTALL_CUDA = "pip install 'jaxdist[cuda13]', or 'jaxdist[cuda12]' for CUDA 12"


def has_cuda_plugin() -> bool:
    """Whether jax's CUDA plugin is installed. What is described without devices is then for GPUs, unless
    `devices.platform` is cpu."""
    return any(importlib.util.find_spec(name) is not None for name in GPU_PLUGINS if "cuda" in name)


def warmup_of(asked: int, steps: int) -> int:
    """The steps of warm-up in a run of so many steps: what is asked for, or half of the run if that is longer than it.

    Whoever tries a configuration with few steps then sees the rate rise, and fall.
    """
    return asked if asked <= steps else steps // 2


def has_gpus(root: Path = Path("/")) -> bool:
    """Whether this machine shows NVIDIA GPUs. root: the folder that has dev/ and proc/."""
    return any((root / path).exists() for path in ("dev/nvidia0", "proc/driver/nvidia"))


def unused_gpus(root: Path = Path("/")) -> str | None:
    """A line about NVIDIA GPUs that jax cannot use, as it has no plugin for them. None where there are none, or one is.

    root: the folder that has dev/ and proc/.
    """
    if not has_gpus(root) or gpu_plugins():
        return None
    return f"NVIDIA GPUs are here, but jax has no CUDA plugin and uses the CPU; {INSTALL_CUDA}"


def gpu_plugins() -> list[str]:
    """The plugins for GPUs that jax has here."""
    return [name for name in GPU_PLUGINS if importlib.util.find_spec(name) is not None]


def only_cpus(environ: Mapping[str, str]) -> bool:
    """Whether jax will use no GPU in this environment, as far as that is known before it starts."""
    return environ.get("JAX_PLATFORMS") == "cpu" or not gpu_plugins()


def resolve_mesh(mesh: MeshConfig, device_count: int, fit: str, *, simulated: bool = False) -> MeshConfig:
    """The mesh for `device_count` devices, with no -1 in it. It may use fewer devices than there are.

    fit="exact": a mesh that needs more devices, or a -1 with nothing whole to stand for, is a `UserError` that lists
    meshes that do fit. fit="shrink": sizes are divided by their smallest prime factor, which halves an even size and
    keeps every divisibility that held before: data first, then fsdp, then the others. What changed is logged.
    Simulated devices are as many as one asks for, so they are never a reason to shrink.
    """
    fit = "exact" if simulated else fit
    sizes: dict[str, int] = asdict(mesh)
    rest = rest_axis(sizes)
    fixed = {axis: size for axis, size in sizes.items() if axis != rest}
    need = math.prod(fixed.values())
    if need > device_count and fit == "shrink":
        fixed = _shrink(fixed, device_count)
        logging.getLogger(__name__).warning(
            "mesh: %s needs %d devices; %d are there, so it shrinks to %s (devices.fit=shrink)",
            _words(sizes),
            need,
            device_count,
            _words(fixed),
        )
        need = math.prod(fixed.values())
    if need > device_count:
        more = "set devices.fit=shrink" if not simulated else "set devices.simulated" + f"={need}" * (need <= 512)
        raise UserError(
            f"mesh: {_words(sizes)} needs {need} devices; {device_count} are there; these fit:"
            f" {_fitting(fixed, device_count, whole=False)}; or {more}"
        )
    if rest is not None and device_count % need and fit != "shrink":
        raise UserError(
            f"mesh.{rest}: -1 stands for {device_count} devices / {need}, which is not whole; with {_words(fixed)} give"
            f" {rest} a size up to {device_count // need}, or put {_fitting(fixed, device_count, whole=True)} beside it"
        )
    return replace(mesh, **fixed, **({rest: device_count // need} if rest is not None else {}))


def rest_axis(sizes: dict[str, int]) -> str | None:
    """The axis of size -1, which takes the rest of the devices, or None. Raises `UserError` for two of them."""
    unset = [axis for axis, size in sizes.items() if size == -1]
    if len(unset) > 1:
        raise UserError(f"mesh: {' and '.join(f'{axis}=-1' for axis in unset)}; allowed: -1, the rest, on one axis")
    return unset[0] if unset else None


def _words(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or f"{next(iter(sizes))}=1"


def _shrink(sizes: dict[str, int], device_count: int) -> dict[str, int]:
    sizes = dict(sizes)
    while math.prod(sizes.values()) > device_count:
        axis = next(axis for axis in SHRINK_ORDER if sizes.get(axis, 1) > 1)
        sizes[axis] //= divisors(sizes[axis])[1]
    return sizes


def _fitting(sizes: dict[str, int], device_count: int, *, whole: bool) -> str:
    """Up to four meshes that fit: on the most devices and nearest to `sizes`, or (whole) dividing the count."""
    axes = [axis for axis, size in sizes.items() if size > 1]
    found: list[tuple[int, ...]] = [()]
    for axis in axes:
        options = [n for n in divisors(device_count if whole else sizes[axis]) if n <= device_count]
        nearest_first = [n for _, n in sorted((abs(math.log(n / sizes[axis])), n) for n in options)]
        options = list(dict.fromkeys([*nearest_first[:7], 1]))  # off always fits
        found = [(*sofar, n) for sofar in found for n in options if math.prod(sofar) * n <= device_count]
    if whole:
        found = [each for each in found if device_count % math.prod(each) == 0]

    def rank(each: tuple[int, ...]) -> tuple[float, float]:
        far = sum(abs(math.log(n / sizes[axis])) for axis, n in zip(axes, each, strict=True))
        return (0 if whole else -math.prod(each), far)

    return ", ".join(_words(dict(zip(axes, each, strict=True))) for each in sorted(found, key=rank)[:4])


def known_devices(devices: DevicesConfig) -> int | None:
    """How many devices there will be if that is sure before jax starts, that is if they are simulated on the CPU.

    platform "gpu" without a plugin for one is a `UserError`; so is a process count in the environment that is no count.
    """
    plugins = gpu_plugins()
    if devices.platform == "gpu" and not plugins:
        raise UserError(
            f"devices.platform: 'gpu' needs a GPU plugin of jax and none is installed; {INSTALL_CUDA}, or use"
            " devices.platform=auto"
        )
    processes = _process_count()
    if (devices.platform != "cpu" and plugins) or processes is None:
        return None
    return devices.simulated * processes


def read_count(
    environ: Mapping[str, str], name: str, *, at_least: int, kind: str = "rank or process count", beside: str = ""
) -> int:
    """The number in a variable of the environment, of a kind. Raises `UserError` for what is none.

    beside: a variable that is set, and needs this one.
    """
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= at_least):
        wrong = f"{show(text)} in the environment is no {kind}"
        if not text:
            wrong = "not set in the environment" + (f", though {beside} is" if beside else "")
        raise UserError(f"{name}: {wrong}; allowed: an integer >= {at_least}")
    return int(text)


def _process_count() -> int | None:
    """From the environment; None where SLURM, MPI or Kubernetes have to be asked for it."""
    sources = [(name, "JAXDIST_INIT_METHOD") for name in ("JAXDIST_NUM_PROCESSES", "WORLD_SIZE", "JAX_NUM_PROCESSES")]
    sources += [("JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"), ("WORLD_SIZE", "MASTER_ADDR")]
    for name, beside in sources:
        text = os.environ.get(name, "") if os.environ.get(beside) else ""  # alone it describes no job
        if text:
            return read_count(os.environ, name, at_least=1)
    alone = all(os.environ.get(name, "1") in ("", "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return 1 if alone and not os.environ.get("JOBSET_NAME") else None
