"""The share of a GPU's memory that JAX takes for its arrays when it starts."""

import os
from collections.abc import MutableMapping

from jaxdist.errors import UserError

VARIABLE = "XLA_CLIENT_MEM_FRACTION"
VARIABLES = (VARIABLE, "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second one is older; jax refuses both together
# JAX by itself takes 0.75 (jax, docs/gpu_memory_allocation.rst). The rest is for CUDA, NCCL and cuBLAS; an assumption.
SHARE = 0.9


def memory_share() -> float:
    """The share that a run started in this environment takes. Raises `UserError` for what is no share."""
    for name in VARIABLES:
        if given := os.environ.get(name):  # an empty one is unset for jax
            try:
                share = float(given)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise UserError(f"{name}: {given!r}; allowed: a number > 0 and <= 1, such as {SHARE}; or unset it")
            return share
    return SHARE


def take_memory(environ: MutableMapping[str, str]) -> None:
    """Let JAX take `SHARE` of each GPU, unless the environment gives another. Before JAX starts its devices."""
    if not any(environ.get(name) for name in VARIABLES):
        environ[VARIABLE] = str(SHARE)
