"""Which positions of a sequence each device of `context` has: two chunks, in a zigzag.

The sequence is cut into 2 C chunks for C devices; device r has chunks r and 2 C - 1 - r. Under a causal mask the first
positions see few keys and the last ones many, so that with this split all devices have the same work (Brandon et al.
2023, "Striped attention"; Llama 3, Grattafiori et al. 2024, section 3.3.2).

Batches stay whole: every device of `context` is given all positions of its samples, a few bytes for each, and the
layers that read a batch take this device's with `own_context`. So neither the data nor a checkpoint knows of `context`.

Legend: C devices of `context`, S positions of the whole sequence, s = S / C those of a device.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import active_axes, rank, to_varying
from jaxdist.errors import UserError

ContextSplit = Literal["heads", "queries"]  # what of attention is split over `context`


def chunks_of(device: int, devices: int) -> tuple[int, int]:
    """The two of 2 C chunks that a device has."""
    return device, 2 * devices - 1 - device


def devices_along(axis: str) -> int:
    """The number of devices of an axis; 1 outside `shard_map`, where a layer has whole arrays."""
    return lax.axis_size(axis) if active_axes(axis) else 1


def context_size() -> int:
    """The number of devices of `context`."""
    return devices_along("context")


def check_length(length: int, devices: int) -> None:
    """Raise `UserError` unless all devices of `context` get two chunks of one length."""
    if length % (2 * devices):
        raise UserError(
            f"context: {length} positions are not divisible by {2 * devices}, two chunks for each of context={devices};"
            " allowed: a sequence length that is, or a mesh with context=1"
        )


def own_context(x: jax.Array, *, dim: int, device: jax.Array | int | None = None) -> jax.Array:
    """This device's positions of what all devices of `context` have whole: S -> s along dim.

    device: that of another device, by its rank along `context`.
    """
    if (count := context_size()) == 1:
        return x
    check_length(x.shape[dim], count)
    own = rank("context") if device is None else device
    length, x = x.shape[dim] // (2 * count), to_varying(x, ("context",))
    first, second = (lax.dynamic_slice_in_dim(x, chunk * length, length, axis=dim) for chunk in chunks_of(own, count))  # type: ignore[arg-type]
    return jnp.concatenate([first, second], dim)


def own_numbers(own: int, dtype: jax.typing.DTypeLike = jnp.int32, device: jax.Array | int | None = None) -> jax.Array:
    """[own] the numbers of this device's positions in the whole sequence. own: how many there are. device: as above."""
    return own_context(jnp.arange(own * context_size(), dtype=dtype), dim=0, device=device)


def in_order(x: jax.Array, *, dim: int) -> jax.Array:
    """What lies device after device along dim, [.. C s ..] -> the same in the order of positions, [.. S ..]."""
    pieces = jnp.split(x, 2 * context_size(), axis=dim)
    return jnp.concatenate([*pieces[::2], *pieces[1::2][::-1]], dim)


def by_device(x: jax.Array, *, dim: int) -> jax.Array:
    """The inverse of `in_order`."""
    count = context_size()
    pieces = jnp.split(x, 2 * count, axis=dim)
    return jnp.concatenate([pieces[chunk] for device in range(count) for chunk in chunks_of(device, count)], dim)
