"""The environment of commands that tests start, and how the tests compile."""

import importlib.metadata
import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ("JAX_", "JAXDIST_", "XLA_", "SLURM_", "OMPI_", "VIRTUAL_")

# The lowest LLVM effort halves the suite's time, most of which is compilation; what is compiled is the same program.
# jax 0.10 has an older code generator too, which compiles in a third of the time; 0.12 has not.
# Devices on two busy cores can keep each other waiting for longer than the 40 s after which XLA aborts.
NEW_COMPILER = importlib.metadata.version("jax") >= "0.11"
FLAGS = (
    "--xla_backend_optimization_level=0",
    *(() if NEW_COMPILER else ("--xla_cpu_use_fusion_emitters=false",)),
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
)
QUICK = {"XLA_FLAGS": " ".join(FLAGS)}


def environment() -> dict[str, str]:
    """Without settings of jax (conftest.py makes some), of a launcher, and of virtual hosts; with this package. It
    compiles as users do; with `QUICK` added, as the tests do."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS)}
    return clean | {"PYTHONPATH": str(ROOT)}
