"""Ahead-of-time compilation of a train step for GPUs that are not there (jax's deviceless compilation).

It gives the program that would run: its memory, its collectives, its schedule. It does not give its speed, because the
kernels of matrix products are chosen on the device.
"""

import importlib.util
import mmap
import shutil
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxdist.build import Parts, assemble
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.mesh import count_hosts, make_mesh, sizes_text
from jaxdist.plan.compiled.hardware import Gpu, peak_flops
from jaxdist.plan.compiled.hlo import Compiled, compiled_collectives
from jaxdist.plan.compiled.memory import Footprint, batch_of, footprint_of
from jaxdist.plan.compiled.replay import Overlap, Rates, overlap
from jaxdist.plan.traced.flops import model_flops
from jaxdist.runtime.gpu_memory import memory_share

INSTALL = "python -m pip install 'jaxdist[aot]' (from a checkout: -e '.[aot]')"


class CudaPackages(NamedTuple):
    """What compiling takes of one version of CUDA.

    toolkit: with ptxas and libdevice, where there is no CUDA toolkit. cudnn: to compile its attention.
    install: how these are installed.
    """

    toolkit: tuple[str, ...]
    cudnn: tuple[str, ...]
    install: str


PLUGINS = {
    "jax_plugins.xla_cuda13": CudaPackages(
        ("nvidia-cuda-nvcc", "nvidia-nvvm"), ("nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvrtc"), INSTALL
    ),
    "jax_plugins.xla_cuda12": CudaPackages(
        ("nvidia-cuda-nvcc-cu12",),
        ("nvidia-cudnn-cu12", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc-cu12"),
        "python -m pip install 'jaxdist[cuda12]'",
    ),
}
# XLA's one-kernel sums of a few bytes are for devices of one host. Without devices it takes all for such, and for
# groups of 64 the kernel does not compile (jax 0.12.0.1: "size mismatch when packing elements for LLVM struct").
ACROSS_HOSTS = {"xla_gpu_experimental_use_collective_kernels": ""}


class Planned(NamedTuple):
    """A compiled step.

    devices, hosts: of the mesh
    attention: the kernel
    parameters: how many the model has
    needed: FLOPs that a step needs of each device, `model_flops`
    peak: dense FLOPs a second of a device in the type in which the step multiplies
    overlap, realistic: the replays by ideal and by realistic rates
    text: the HLO, scheduled
    lower_s, compile_s: seconds that tracing and compiling took on this machine
    """

    gpu: Gpu
    devices: int
    hosts: int
    attention: str
    parameters: int
    footprint: Footprint
    collectives: list[Compiled]
    overlap: Overlap
    realistic: Overlap
    needed: float
    peak: float
    text: str
    lower_s: float
    compile_s: float

    def utilisation(self, replay: Overlap) -> float:
        """Model FLOPs utilisation (MFU) by the rates of a replay: the share of the peak that the model's products
        take."""
        return self.needed / (replay.seconds * self.peak)


class FitVerdict(NamedTuple):
    """Whether a step fits into the memory of a GPU.

    share: of the memory, what a run takes
    spare: bytes left of that; negative: bytes missing
    needed: the share that is enough
    """

    fits: bool
    share: float
    spare: float
    needed: float


def fit_verdict(footprint: Footprint, gpu: Gpu) -> FitVerdict:
    """The verdict for a step on a GPU."""
    share = memory_share()
    spare = gpu.usable - footprint.peak
    return FitVerdict(spare >= 0, share, spare, footprint.peak / gpu.memory)


def plugin_library() -> Path:
    """The shared library of jax's CUDA plugin. Raises `UserError` that says what to install."""
    return _plugin()[0]


def _plugin() -> tuple[Path, CudaPackages]:
    """(the library of the first plugin that is here, the packages that go with it)."""
    for name, packages in PLUGINS.items():
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of the folder jax_plugins
            found = None
        for folder in (found.submodule_search_locations or ()) if found is not None else ():
            if (library := Path(folder) / "xla_cuda_plugin.so").is_file():
                return library, packages
    raise UserError(f"--compile: jax's CUDA plugin is not installed; install it, no GPU is needed: {INSTALL}")


def check_toolkit(config: Config, attention: str) -> None:
    """Raise `UserError` that says what to install, where something is missing that compiles for GPUs."""
    toolkit, cudnn, install = _plugin()[1]
    if shutil.which("ptxas") is None and (missing := _missing(toolkit)):
        raise UserError(f"--compile: {' and '.join(missing)} not installed, and no CUDA toolkit; install: {install}")
    if attention == "cudnn" and (missing := _missing(cudnn)):
        raise UserError(
            f"--compile: attention is cuDNN's, and {', '.join(missing)} not installed; install: {install};"
            " or plan with model.attention=xla"
        )


def _missing(packages: tuple[str, ...]) -> list[str]:
    def there(name: str) -> bool:
        try:
            return bool(version(name))
        except PackageNotFoundError:
            return False

    return [name for name in packages if not there(name)]


def target_config(gpu: Gpu, library: Path) -> str:
    """XLA's description of a GPU, which the plugin carries since jax 0.12. Raises `UserError` where it does not."""
    wanted = f'device_description_str: "{gpu.description}"'.encode()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.find(wanted)
        if place >= 0:
            start = content.rfind(b"gpu_device_info {", 0, place)
            return content[start : content.find(b"\0", place)].decode()
    raise UserError(
        f"--compile: jax {jax.__version__}'s CUDA plugin has no description of {gpu.description}; take"
        " Python 3.12 with jax 0.12, or --target-config FILE from a machine that has one"
    )


def mesh_of(config: Config, text: str, *, hosts: int | None, gpus_per_host: int) -> Mesh:
    """The mesh of a configuration on GPUs that are not there.

    text: from `target_config`
    hosts: None for as many as the mesh needs

    Raises `UserError` unless the mesh takes all GPUs of the hosts.
    """
    sizes, needed = asdict(config.mesh), config.mesh.devices
    if hosts is None:
        gpus_per_host = min(gpus_per_host, needed)
        hosts = -(-needed // gpus_per_host)
    if hosts * gpus_per_host != needed:
        shape = sizes_text(sizes, none="of one device")
        raise UserError(
            f"mesh: {shape} takes {needed} GPUs; --hosts {hosts} --gpus-per-host {gpus_per_host} are"
            f" {hosts * gpus_per_host}; change the one or the other"
        )
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{hosts}x{gpus_per_host}", target_config=text
    )
    return make_mesh(**sizes, devices=described.devices)


def compile_ahead(config: Config, gpu: Gpu, mesh: Mesh, rates: tuple[Rates, Rates]) -> Planned:
    """Trace and compile the step of a configuration, the very one that trains. rates: ideal and realistic ones."""
    start = time.perf_counter()
    parts = assemble(config, mesh)
    check_toolkit(config, parts.attention[0])
    lowered = parts.step.lower(parts.target, batch_of(config, mesh))
    traced = time.perf_counter()
    program = lowered.compile(compiler_options=ACROSS_HOSTS if count_hosts(mesh) > 1 and mesh.size >= 64 else None)
    return planned_of(program, config, parts, gpu, rates, (traced - start, time.perf_counter() - traced))


def planned_of(
    program: Any, config: Config, parts: Parts, gpu: Gpu, rates: tuple[Rates, Rates], seconds: tuple[float, float]
) -> Planned:
    """The `Planned` of a compiled step. rates: ideal and realistic ones. seconds: that tracing and compiling took."""
    target, precision = parts.target, parts.options.precision
    mesh, batch = target.step.sharding.mesh, batch_of(config, target.step.sharding.mesh)
    needed = model_flops(parts.model, parts.evaluated, target.model_state, batch, precision=precision)
    footprint, text = footprint_of(program, config, parts), program.as_text()
    assert footprint is not None and "is_scheduled=true" in text[:2000]
    return Planned(
        gpu=gpu,
        devices=mesh.size,
        hosts=count_hosts(mesh),
        attention=parts.attention[0],
        parameters=parts.model.parameters,
        footprint=footprint,
        collectives=compiled_collectives(text),
        overlap=overlap(text, rates[0]),
        realistic=overlap(text, rates[1]),
        needed=needed / mesh.size,
        peak=peak_flops(gpu.description, precision) or gpu.bf16,
        text=text,
        lower_s=seconds[0],
        compile_s=seconds[1],
    )
