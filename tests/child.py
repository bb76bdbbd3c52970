"""The environment of commands that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ("JAX_", "JAXDIST_", "XLA_", "SLURM_", "OMPI_", "VIRTUAL_")


def environment() -> dict[str, str]:
    """Without settings of jax (conftest.py makes some), of a launcher, and of virtual hosts; with this package."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS)}
    return clean | {"PYTHONPATH": str(ROOT)}
