"""PyTorch with kernels chosen by measurement, and with CUDA graphs."""

from harness.contenders.pytorch import compiled
from harness.task import Contender, Task


def pytorch_autotuned(task: Task) -> Contender:
    """`torch.compile(mode="max-autotune")`. It compiles for minutes."""
    return compiled(task, mode="max-autotune")
