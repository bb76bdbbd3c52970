"""The environment of commands that tests start: of what conftest.py tells jax, only where compiled programs are."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ("JAX_", "XLA_", "SLURM_", "OMPI_", "VIRTUAL_")
KEPT = ("JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_")


def environment() -> dict[str, str]:
    """Without settings of jax, of a launcher, and of virtual hosts; with this package."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS) or key.startswith(KEPT)}
    return clean | {"PYTHONPATH": str(ROOT)}
