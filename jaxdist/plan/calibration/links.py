"""Measurement of links by collectives of several sizes: one latency of a round, and one rate, for each link."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.errors import UserError
from jaxdist.plan.calibration.file import MeasuredLink
from jaxdist.plan.calibration.repeated import Timed, by_turns
from jaxdist.plan.closed.sent import rounds
from jaxdist.plan.traced.ledger import wire_bytes

_SMALL = 1024  # elements whose time is latency
_CHAIN = 16  # small messages one after the other in a program: one alone would measure how a program is started
# Rates are measured by messages of about the size of a layer's parameters, one after the other: much larger ones, sent
# both ways at once, take up to twice the time of their bytes over TCP, which steps hardly send.
_MESSAGE = 2**15  # elements of the smallest of them
_MESSAGE_S = 0.005  # on fast links they are made larger, until one takes as long
_LONG_S = 0.05  # all of them must take as long: shorter ones measure buffers and bursts of the link
_MOST = 2**26  # elements of the largest message
_ABOVE = 1.15  # a rate that is so many times the declared one is no rate of the link
PROBED_OPS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "psum": lambda x, n: lax.psum(x, "ends"),
    "all_gather": lambda x, n: lax.all_gather(x, "ends", tiled=True),
    "reduce_scatter": lambda x, n: lax.psum_scatter(x, "ends", tiled=True),
    "all_to_all": lambda x, n: lax.all_to_all(x, "ends", 0, 0, tiled=True),
    "ppermute": lambda x, n: lax.ppermute(x, "ends", [(i, (i + 1) % n) for i in range(n)]),
}


def measure_link(
    ends: Sequence[Sequence[jax.Device]],
    *,
    declared: float | None = None,
    burst: int = 0,
    progress: Callable[[str], None],
) -> MeasuredLink:
    """The link between these ends, as one device of an end has it while all of them send. All processes of a job must
    call it, and have a device in it.

    ends: such as hosts, each with as many devices.
    declared: its rate in bytes a second, where it is known. burst: bytes that the link takes at once before its rate
    holds; the messages of an op have 8 times as many.

    Raises `UserError` for a rate above the declared one: what was measured is no link.
    """
    mesh = Mesh(np.array([*map(list, ends)]), ("ends", "abreast"), axis_types=(AxisType.Auto,) * 2)
    n, abreast = mesh.devices.shape
    lengths = {(op, _SMALL): _CHAIN for op in PROBED_OPS}
    for op in PROBED_OPS:
        size, times = _long_enough(op, mesh, burst)
        lengths[op, size] = times
        progress(f"link of {n} x {abreast} devices: {op}, {times} messages of {4 * size:,} bytes")
    timed = by_turns({(op, size): _program(op, size, mesh, times=times) for (op, size), times in lengths.items()})
    each = {key: whole._replace(median=whole.median / lengths[key]) for key, whole in timed.items()}
    return fitted(each, n, declared=declared, abreast=abreast)


def fitted(
    timed: dict[tuple[str, int], Timed], n: int, *, declared: float | None = None, abreast: int = 1
) -> MeasuredLink:
    """The link from the seconds of collectives among n devices, {(op, elements): seconds}: medians over the ops, as a
    line through two points of one op follows its noise. Of what long messages take, no latency is taken off: that of
    short ones is mostly a processor's, which works while long ones are on their way.

    abreast: how many devices of an end share it. Raises `UserError` for a rate above the declared one.
    """
    small = {op: each.median for (op, size), each in timed.items() if size == _SMALL}
    latency = statistics.median(each / rounds(op, n) for op, each in small.items())
    long = {(op, size): each for (op, size), each in timed.items() if size != _SMALL}
    rate = statistics.median(wire_bytes(op, 4 * size, n) / each.median for (op, size), each in long.items())
    if declared is not None and rate * abreast > _ABOVE * declared:
        raise UserError(
            f"calibrate: {rate * abreast / 1e6:.4g} MB/s was measured on a link of {declared / 1e6:.4g} MB/s: messages"
            " went into a buffer or a burst; give --burst BYTES of the link, or another --link"
        )
    spread = statistics.median(each.spread for each in long.values())
    return MeasuredLink(latency, rate, spread)


def _long_enough(op: str, mesh: Mesh, burst: int) -> tuple[int, int]:
    """(elements of a message, how many of them take long enough), found by growing it."""
    size = _MESSAGE
    while True:
        beyond = max(1, -(-8 * burst // (4 * size)))  # as many as a burst cannot hold
        took = by_turns({op: _program(op, size, mesh, times=beyond)}, repetitions=1)[op].median / beyond
        if took >= _MESSAGE_S or size >= _MOST:
            return size, max(beyond, math.ceil(_LONG_S / took))
        grown = size * min(16, max(2, _MESSAGE_S / took))
        size = min(_MOST, 2 ** math.ceil(math.log2(grown)))


def _program(op: str, size: int, mesh: Mesh, *, times: int = 1) -> Callable[[], Any]:
    """A collective of `size` elements a device; `times` of them, each of what the one before gave."""
    n, spec = mesh.shape["ends"], P(("ends", "abreast"))
    size = -(-size // n) * n
    x = jax.make_array_from_callback(
        (mesh.size * size,), NamedSharding(mesh, spec), lambda index: np.ones((size,), np.float32)
    )

    def again(found: jax.Array) -> jax.Array:
        """The result in the shape of the operand."""
        if op == "reduce_scatter":
            return jnp.tile(found, n)
        return lax.pcast(found / n, "ends", to="varying") if op == "psum" else found[:size]

    def region(x: jax.Array) -> jax.Array:
        for _ in range(times):
            x = again(PROBED_OPS[op](x, n))
        return x[:1]

    run = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=spec, out_specs=spec))
    return lambda: run(x)
