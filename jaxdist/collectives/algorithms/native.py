"""`lax.psum`, `lax.psum_scatter`, `lax.all_gather`: the compiler's own collectives (NCCL on GPUs)."""

from jax import lax

from jaxdist.collectives.algorithm import Algorithm, Array, ring_cost
from jaxdist.collectives.varying import to_varying


def _all_reduce(x: Array, axes: tuple[str, ...]) -> Array:
    return lax.psum(to_varying(x, axes), axes)


def _reduce_scatter(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    return lax.psum_scatter(to_varying(x, axes), axes, scatter_dimension=dim, tiled=True)


def _all_gather(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    return lax.all_gather(to_varying(x, axes), axes, axis=dim, tiled=True)


native = Algorithm(_all_reduce, _reduce_scatter, _all_gather, ring_cost)
