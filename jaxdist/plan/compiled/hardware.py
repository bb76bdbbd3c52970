"""The table of GPUs that a step can be compiled for. Its figures are the maker's, for dense products, not measured."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxdist.errors import UserError
from jaxdist.plan.compiled.replay import Rates
from jaxdist.precision.policy import Precision
from jaxdist.runtime.gpu_memory import memory_share

# Assumed shares of the makers' figures, for replays alone: 800 of 989 TFLOP/s, what large products reach on H100 and
# H200; 400 of 450 GB/s, bus bandwidth of large collectives inside a node (nccl-tests issues 212 and 272: 360 to 480).
_PRODUCTS, _NETWORK = 0.809, 0.889
# Shares that one H200 reached (docs/measurements/one_h200.json), assumed for the others too: 733 TFLOP/s, the mean of
# 13 products of models' shapes (670 to 779); 4.0 TB/s to add one to an array; 241 TFLOP/s of attention forward,
# with heads of 64. Assumed are the same share for float8 and float32, and of the network 370 of 450 GB/s and 12 us a
# collective (nccl-tests).
_PRODUCTS_SEEN, _MEMORY_SEEN, _ATTENTION_SEEN, _NETWORK_SEEN, _LATENCY, _LEAST = 0.741, 0.833, 0.244, 0.822, 12e-6, 2e-6


class Gpu(NamedTuple):
    """A GPU.

    description: its name in XLA
    memory: bytes
    bf16, fp8, tf32: dense FLOPs a second; 0 where it has no fp8. fp16 is as fast as bf16, and XLA multiplies float32
        as TF32 unless it is told otherwise
    bandwidth: of its memory, bytes a second
    nvlink: bytes a second that it sends
    source: where the figures are from
    """

    description: str
    memory: int
    bf16: float
    fp8: float
    tf32: float
    bandwidth: float
    nvlink: float
    source: str

    @property
    def usable(self) -> float:
        """Bytes that a run which is started in this environment takes for its arrays."""
        return memory_share() * self.memory

    @property
    def rates(self) -> Rates:
        """Ideal rates: large products, the whole bandwidth, no latency. For comparisons of schedules."""
        return Rates(
            _PRODUCTS * self.bf16,
            self.bandwidth,
            _NETWORK * self.nvlink,
            fp8=_PRODUCTS * self.fp8 or None,
            tf32=_PRODUCTS * self.tf32,
        )

    @property
    def realistic(self) -> Rates:
        """Realistic rates: those that one H200 reached, as shares of the maker's, and 2 us for a kernel at least."""
        return Rates(
            _PRODUCTS_SEEN * self.bf16,
            _MEMORY_SEEN * self.bandwidth,
            _NETWORK_SEEN * self.nvlink,
            _LATENCY,
            attention=_ATTENTION_SEEN * self.bf16,
            least=_LEAST,
            fp8=_PRODUCTS_SEEN * self.fp8 or None,
            tf32=_PRODUCTS_SEEN * self.tf32,
        )


# memory: `device_memory_size` of XLA's descriptions, xla/backends/gpu/target_config/specs, what CUDA reports as the
# device's whole memory.
GPUS: dict[str, Gpu] = {
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 42_331_013_120, 312e12, 0.0, 156e12, 1.555e12, 300e9,
     "NVIDIA A100 datasheet: A100 40GB SXM; NVLink 600 GB/s both ways"),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", 85_100_068_864, 312e12, 0.0, 156e12, 2.039e12, 300e9,
     "NVIDIA A100 datasheet: A100 80GB SXM; NVLink 600 GB/s both ways"),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 84_942_979_072, 989.4e12, 1978.9e12, 494.7e12, 3.35e12, 450e9,
     "NVIDIA H100 datasheet: H100 SXM, figures with sparsity halved; NVLink 900 GB/s both ways"),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", 151_397_597_184, 989.4e12, 1978.9e12, 494.7e12, 4.8e12, 450e9,
     "NVIDIA H200 datasheet: H200 SXM, figures with sparsity halved; NVLink 900 GB/s both ways"),
    "b200": Gpu("NVIDIA B200", 191_514_411_008, 2250e12, 4500e12, 1125e12, 8.0e12, 900e9,
     "NVIDIA DGX B200 datasheet, an eighth of it, figures with sparsity halved; NVLink 1.8 TB/s both ways"),
    "gb200": Gpu("NVIDIA GB200", 197_897_748_480, 2500e12, 5000e12, 1250e12, 8.0e12, 900e9,
     "NVIDIA GB200 NVL72 page, half of a superchip, figures with sparsity halved; NVLink 3.6 TB/s both ways for two"),
}  # fmt: skip


def gpu_of(device_kind: str) -> Gpu | None:
    """The GPU that `jax.Device.device_kind` names, in XLA's words or the beginning of them; None if it is not here."""
    return next((gpu for gpu in GPUS.values() if f"{gpu.description} ".startswith(f"{device_kind} ")), None)


def peak_flops(device_kind: str, precision: Precision) -> float | None:
    """The dense FLOPs a second of a device in the type in which this precision multiplies; None where the maker's
    figure is not here."""
    gpu = gpu_of(device_kind)
    if gpu is None:
        return None
    size = jnp.dtype(precision.compute).itemsize
    return (gpu.fp8 if precision.fp8 else {2: gpu.bf16, 4: gpu.tf32}.get(size)) or None


def get_gpu(name: str) -> Gpu:
    """The GPU of this name. Raises `UserError` for one that is not in the table."""
    if name not in GPUS:
        raise UserError(f"--gpu: {name!r} is not known; allowed: {', '.join(GPUS)}")
    return GPUS[name]
