"""The types of a schedule and of what it runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from jaxdist.precision import accumulation_dtype

PyTree = Any


class Program(NamedTuple):
    """What a schedule may call. Gathers, remat, the scan over blocks and dropout keys are already inside.

    loss: (diff, held, microbatch) -> (sum, weight). The other three are its parts, for schedules that cut the model
    into stages: embed (diff, held, microbatch) -> h; blocks (diff, held, h, microbatch) -> h; head (diff, held, h,
    microbatch) -> (sum, weight). They are None for a foreign loss.
    """

    loss: Callable[..., tuple[jax.Array, jax.Array]]
    embed: Callable[..., jax.Array] | None = None
    blocks: Callable[..., jax.Array] | None = None
    head: Callable[..., tuple[jax.Array, jax.Array]] | None = None


class Schedule(Protocol):
    """Run all microbatches, inside the manual region.

    microbatches: leaves [M, b, ...]. seed: the static power of two that the loss is multiplied by before
    differentiation; the caller multiplies gradients by 1 / (seed * global weight) afterwards, which is exact for ragged
    batches because only a power of two has touched them. reduce_dtype: of the accumulated gradients, used at no less
    than fp32. Returns this device's (loss sum, weight sum, gradients with respect to diff times seed).
    """

    def __call__(
        self, program: Program, diff: PyTree, held: PyTree, microbatches: PyTree, *, seed: float, reduce_dtype: Any
    ) -> tuple[jax.Array, jax.Array, PyTree]: ...


def run_microbatch(
    program: Program, diff: PyTree, held: PyTree, microbatch: PyTree, *, seed: float, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree]:
    """(loss sum, weight sum, gradients times seed) of one microbatch, all stages at once."""

    def seeded(diff: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss, weight = program.loss(diff, held, microbatch)
        return loss * seed, (loss, weight)

    wide = accumulation_dtype(reduce_dtype)
    grads, (loss, weight) = jax.grad(seeded, has_aux=True)(diff)
    return loss, weight, jax.tree.map(lambda grad: grad.astype(wide), grads)
