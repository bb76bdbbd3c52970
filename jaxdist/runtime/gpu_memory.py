"""The share of a GPU's memory that JAX takes for its arrays when it starts."""

import os
from collections.abc import MutableMapping

from jaxdist.errors import UserError

VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# A variable that turns JAX's own pool of memory off, or sets its size in another way.
OTHERS = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_CLIENT_MEM_FRACTION")
# JAX by itself takes 0.75 (jax, docs/gpu_memory_allocation.rst). The rest is for CUDA, NCCL and cuBLAS; an assumption.
SHARE = 0.9


def memory_share() -> float:
    """The share that a run started in this environment takes. Raises `UserError` for what is no share."""
    given = os.environ.get(VARIABLE)
    try:
        share = SHARE if given is None else float(given)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"{VARIABLE}: {given!r}; allowed: a number > 0 and <= 1, such as {SHARE}; or unset it")
    return share


def take_memory(environ: MutableMapping[str, str]) -> None:
    """Let JAX take `SHARE` of each GPU, unless the environment says something else. Before JAX starts its devices."""
    if not {VARIABLE, *OTHERS} & set(environ):
        environ[VARIABLE] = str(SHARE)
