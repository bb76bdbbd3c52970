"""Times collectives by any algorithm: on simulated devices, on GPUs, on the processes of a job, or on virtual hosts.

    python scripts/bench/collectives.py --algorithms ring,tree --bytes 1kb:16mb --devices 8
    python scripts/bench/collectives.py --algorithms all --virtual-hosts 4 --rate 200mbit --json OUT.json --plot OUT.svg

Every call is a program of its own, compiled once. First its result is compared with numpy's. Before each call all
processes meet in a barrier; the time of a call is that of the slowest process. The algorithms take turns, in an order
that differs from round to round; figures are medians over rounds. In a job (`jaxdist.runtime.join.environment`) every
process runs this script, and process 0 reports.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure

from jaxdist import collectives, registry
from jaxdist.collectives import Cost, Link, make_link, to_varying
from jaxdist.collectives.algorithms.auto import choose
from jaxdist.collectives.compression import SCALE_BLOCK, SCALE_BYTES
from jaxdist.collectives.cost import LINKS, NOTHING
from jaxdist.collectives.group import Group, default_link
from jaxdist.config.arguments import COUNT, output_file, picture_file
from jaxdist.config.schema import DevicesConfig
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import parse_links
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.mesh import make_mesh
from jaxdist.observe import measured_on
from jaxdist.plan.traced.rounds import rounds_of
from jaxdist.runtime.join.environment import find_job
from jaxdist.runtime.join.join import join_job
from jaxdist.runtime.start import choose_platform, fail_alone
from jaxdist.specs import without_idle

AXES = ("data", "fsdp")
UNITS = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
WARM_UP = 2  # calls
HEADERS = 14 + 20 + 32  # bytes of a packet that are not payload: Ethernet, IPv4, TCP with timestamps
INTERFACE, RATE = "VIRTUAL_HOSTS_INTERFACE", "VIRTUAL_HOSTS_RATE"  # set on virtual hosts
# The least that a host must send or receive, in units of N: n devices with N bytes each, d of them on each host. With
# d = 1 it turns time into the "bus bandwidth" of nccl-tests.
LEAST: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda n, d: 2 * (n - d) / n,
    "reduce_scatter": lambda n, d: (n - d) / n,
    "all_gather": lambda n, d: n - d,
}


class Setup(NamedTuple):
    """The devices and links of all measurements. local: devices of a host. group: all devices, with the link of
    predictions and `auto`. itemsize: bytes of an element on the wire, with scales. bits: the slowest link's rate in
    bits per second, where it is known."""

    options: argparse.Namespace
    mesh: Mesh
    rows: PartitionSpec
    hosts: int
    local: int
    group: Group
    link: Link
    itemsize: float
    bits: int | None


def parse_sizes(text: str) -> list[int]:
    """ "64,4kb,1mb"; or "1kb:64mb", each four times the one before; or "1kb:64mb:2", twice."""

    def size(word: str) -> int:
        match = re.fullmatch(r"([1-9]\d{0,11})(b|kb|mb|gb)?", word)
        if match is None:
            raise UserError(f"--bytes: {text!r}; allowed: 64, 4kb, 16mb, a list of those with commas, or FROM:TO")
        return int(match[1]) * UNITS[match[2] or "b"]

    if ":" not in text:
        return [size(word) for word in text.split(",")]
    first, last, factor = [size(word) for word in (text if text.count(":") > 1 else f"{text}:4").split(":", 2)]
    if factor < 2 or first > last:
        raise UserError(f"--bytes: {text!r}; allowed: FROM:TO or FROM:TO:FACTOR with FROM <= TO and FACTOR >= 2")
    return [first * factor**k for k in range(64) if first * factor**k <= last]


def parse_algorithms(text: str, operation: str, wire: str | None) -> list[str]:
    """Names; "all" are those that have the operation and the wire format."""
    names = []
    for name in registry.names("jaxdist.collectives.algorithms") if text == "all" else text.split(","):
        with contextlib.suppress(*([UserError] if text == "all" else [])):
            collectives.check_wire(wire, name)
            if getattr(collectives.get_algorithm(name), operation) is None:
                raise UserError(f"--algorithms: {name!r} has no {operation}; leave it out")
            names.append(name)
    return names


def parse(arguments: list[str]) -> argparse.Namespace:
    """The checked options. Starts no device."""
    parser = CommandParser(description="Time collectives, check their results, and compare with the cost model.")
    parser.add_argument("--operation", default="all_reduce", choices=list(LEAST))
    parser.add_argument("--algorithms", default="all", metavar="NAME,...", help="or all (default)")
    parser.add_argument("--bytes", default="1kb:1mb", metavar="SIZES", help="of a device's input: 64,4kb or 1kb:64mb")
    parser.add_argument(
        "--devices", type=COUNT, metavar="N", help="simulated, or the first N (default: 8; in jobs, all)"
    )
    parser.add_argument("--mesh", metavar="OUTERxINNER", help="two axes; the inner one is a fast neighbourhood")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "int32", "int8"))
    parser.add_argument("--wire-dtype", choices=("bfloat16", "int8"))
    parser.add_argument("--platform", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--rounds", type=COUNT, default=7, metavar="N", help="calls that are timed (default: 7)")
    parser.add_argument("--link", help=f"for predictions and auto: {', '.join(LINKS)}, or a rate such as 200mbit")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("--plot", type=picture_file, metavar="OUT.svg")
    hosts = parser.add_argument_group("virtual hosts", "see virtual_hosts.py")
    hosts.add_argument("--virtual-hosts", type=COUNT, metavar="N", help="start N and run there; needs Linux and root")
    hosts.add_argument("--rate", default="none", help="of their links, as 200mbit (default: none)")
    hosts.add_argument("--burst", default="256kb")
    hosts.add_argument("--congestion", default="cubic", metavar="NAME")
    hosts.add_argument("--devices-per-host", type=COUNT, default=1, metavar="D")
    options = parser.parse_args(arguments)
    options.sizes = parse_sizes(options.bytes)
    options.names = parse_algorithms(options.algorithms, options.operation, options.wire_dtype)
    shape = re.fullmatch(r"([1-9]\d{0,2})(?:x([1-9]\d{0,2}))?", options.mesh or str(options.devices or 8))
    if shape is None or (options.mesh and (options.devices is not None or shape[2] is None)):
        raise UserError("--mesh and --devices: one of the two; allowed: 1 to 999, OUTERxINNER such as 2x4 for --mesh")
    options.shape = tuple(int(size) for size in shape.groups() if size)
    if options.wire_dtype and options.operation == "all_gather":
        raise UserError(f"--wire-dtype: {options.wire_dtype}; allowed: not for all_gather; leave it out")
    if options.link is not None:
        make_link(options.link)
    if options.virtual_hosts is not None:
        parse_links(options.rate, options.burst, options.congestion, options.virtual_hosts)
    return options


def start(options: argparse.Namespace) -> Setup:
    """Devices, mesh, and what is known of the links."""
    job, virtual, chosen = find_job(os.environ), INTERFACE in os.environ, options.mesh or options.devices
    simulated = options.devices_per_host if virtual else math.prod(options.shape) if job is None else 1
    choose_platform(DevicesConfig(platform="cpu" if virtual else options.platform, simulated=simulated))
    if job is not None and not jax.distributed.is_initialized():
        join_job(job)
    total, hosts = jax.device_count(), jax.process_count()
    shape = options.shape if chosen or hosts == 1 else (hosts, total // hosts) if total > hosts else (total,)
    if hosts > 1 and math.prod(shape) != total:
        raise UserError(f"--mesh or --devices: {math.prod(shape)}, but the job has {total} devices; leave it out")
    mesh = make_mesh(**dict(zip(AXES, shape, strict=False)))
    rate = options.rate if options.virtual_hosts else os.environ.get(RATE, "none")
    if options.link not in (None, *LINKS):
        rate = options.link
    rates = [parse_links(text, "256kb", "cubic", 1)[0].rate for text in rate.split(",") if hosts > 1]
    bits = min((rate for rate in rates if rate is not None), default=None)
    name = options.link or (f"{bits / 1e3}kbit" if bits is not None else None)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        link = make_link(name) if name else default_link()
    group = replace(Group.of(*([size for size in shape if size > 1] or [1])), link=link)
    sizes = {None: jnp.dtype(options.dtype).itemsize, "bfloat16": 2, "int8": (SCALE_BLOCK + SCALE_BYTES) / SCALE_BLOCK}
    itemsize, rows = sizes[options.wire_dtype], without_idle(PartitionSpec(AXES), mesh)
    return Setup(options, mesh, rows, hosts, mesh.size // hosts, group, link, itemsize, bits)


def pattern(rank: int, size: int, dtype: str) -> np.ndarray:
    """The input of a rank: small integers, whose sums are exact."""
    return (np.arange(size) % 5 + rank % 3).astype(jnp.dtype(dtype))


def check(setup: Setup, algorithm: str, result: jax.Array, size: int) -> None:
    """Raise `UserError` unless every device of this process has what numpy says."""
    options, n = setup.options, setup.mesh.size
    inputs = [pattern(rank, size, options.dtype) for rank in range(n)]
    whole = np.concatenate(inputs) if options.operation == "all_gather" else np.asarray(sum(inputs))
    tolerance = n * float(whole.max()) / 100 if options.wire_dtype or options.dtype == "bfloat16" else 0.0
    for shard in result.addressable_shards:
        rank = shard.index[0].start or 0
        want = whole.reshape(n, -1)[rank] if options.operation == "reduce_scatter" else whole
        if np.abs(np.asarray(shard.data)[0].astype(np.float64) - want.astype(np.float64)).max() > tolerance:
            raise UserError(f"{options.operation} by {algorithm} of {size} elements is wrong on rank {rank}")


def call(setup: Setup, algorithm: str, x: jax.Array) -> Any:
    """The collective, inside `shard_map`."""
    wire = {} if setup.options.wire_dtype is None else {"wire_dtype": setup.options.wire_dtype}
    return getattr(collectives, setup.options.operation)(x, AXES, algorithm=algorithm, link=setup.link, **wire)


def program(setup: Setup, body: Callable[[jax.Array], jax.Array]) -> Any:
    """[n, size] -> [n, ...]: `body` on the row of each device, compiled."""
    on_row = lambda x: to_varying(body(x[0]), AXES)[None]  # noqa: E731
    return jax.jit(jax.shard_map(on_row, mesh=setup.mesh, in_specs=setup.rows, out_specs=setup.rows))


def input_of(setup: Setup, size: int) -> jax.Array:
    """[n, size], the pattern of each rank in its row."""
    row = lambda index: pattern(index[0].start or 0, size, setup.options.dtype)[None]  # noqa: E731
    return jax.make_array_from_callback((setup.mesh.size, size), NamedSharding(setup.mesh, setup.rows), row)


def sent() -> tuple[int, int]:
    """Bytes and packets that have left the interface of this virtual host; zeros elsewhere."""
    if INTERFACE not in os.environ:
        return 0, 0
    folder = Path("/sys/class/net", os.environ[INTERFACE], "statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text())


def measure(calls: Sequence[Callable[[], Any]], barrier: Callable[[], Any], rounds: int) -> np.ndarray:
    """[processes, rounds, calls + 1, 3]: seconds, bytes and packets of every call; the last call is of nothing."""
    found = np.zeros((rounds, len(calls) + 1, 3), np.float32)
    for round_ in range(rounds):
        for index in random.Random(round_).sample(range(len(calls) + 1), len(calls) + 1):  # as in all processes
            jax.block_until_ready(barrier())
            before, began = sent(), time.perf_counter()
            if index < len(calls):
                jax.block_until_ready(calls[index]())
            seconds = time.perf_counter() - began
            jax.block_until_ready(barrier())  # so that all that was sent is counted
            found[round_, index] = (seconds, *(now - then for now, then in zip(sent(), before, strict=True)))
    return np.asarray(multihost_utils.process_allgather(found)).reshape(-1, *found.shape)


def traffic(setup: Setup, algorithm: str, size: int) -> tuple[Cost, list[int], int]:
    """One call: its cost in bytes; the bytes that leave each host; and, round by round, the most that one host sends or
    receives, summed. What native does is the library's choice: it is counted as if by a ring."""
    if setup.mesh.size == 1:
        return NOTHING, [0], 0
    cost = collectives.get_algorithm(algorithm).cost(setup.options.operation, size, setup.group)
    rounds = rounds_of(
        functools.partial(call, setup, "ring" if algorithm == "native" else algorithm),
        jax.ShapeDtypeStruct((size,), setup.options.dtype),
        mesh={axis: setup.mesh.shape[axis] for axis in AXES},
    )
    leaving, busiest = [0] * setup.hosts, 0
    for messages in rounds:
        load: Counter[tuple[str, int]] = Counter()
        for message in messages:
            source, target = message.source // setup.local, message.target // setup.local
            if source != target:
                load.update({("out", source): message.nbytes, ("in", target): message.nbytes})
                leaving[source] += message.nbytes
        busiest += max(load.values(), default=0)
    if setup.hosts > 1 and setup.local > 1:  # the devices of a host share its link
        cost = cost._replace(serial=busiest / setup.itemsize + cost.inside)  # type: ignore[arg-type]
    return cost.scaled(setup.itemsize), leaving, busiest


def least(setup: Setup, nbytes: float) -> float:
    """The bound of every algorithm in seconds: what the busiest host must send or receive, at the links' rate."""
    assert setup.bits is not None
    on_wire = nbytes * setup.itemsize / jnp.dtype(setup.options.dtype).itemsize
    return LEAST[setup.options.operation](setup.mesh.size, setup.local) * on_wire * 8 / setup.bits


def row_of(setup: Setup, algorithm: str, size: int, found: np.ndarray) -> dict[str, Any]:
    """The figures of one algorithm and size. found: [processes, rounds, 2, 3], its calls and those of nothing."""
    operation, nbytes = setup.options.operation, size * jnp.dtype(setup.options.dtype).itemsize
    chosen = choose(operation, size, setup.itemsize, setup.group) if algorithm == "auto" else algorithm  # type: ignore[arg-type]
    cost, leaving, busiest = traffic(setup, chosen, size)
    times = found[:, :, 0, 0].max(axis=0) * 1e3  # of the process that took longest, in each round
    median = float(np.median(times))
    inside = LINKS["local"] if setup.hosts > 1 and setup.local > 1 else None
    row: dict[str, Any] = {"bytes": nbytes, "algorithm": algorithm, "chosen": chosen}
    row |= {"median_ms": median, "min_ms": float(times.min()), "max_ms": float(times.max())}
    row["predicted_ms"] = cost.seconds(setup.link, inside) * 1e3
    row["bus_mb_per_s"] = LEAST[operation](setup.mesh.size, 1) * nbytes / median / 1e3
    if setup.bits is not None:
        row |= {"of_bound": least(setup, nbytes) * 1e3 / median, "of_own_bound": busiest * 8e3 / setup.bits / median}
    if INTERFACE in os.environ:
        medians = np.median(found[..., 1:], axis=1)  # [hosts, 2, 2]
        total, packets = np.moveaxis(medians[:, 0] - medians[:, 1], -1, 0).astype(int)
        payload = (total - HEADERS * packets).tolist()
        row |= {"interface_bytes": total.tolist(), "payload_bytes": payload, "cost_bytes": leaving}
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def bench(setup: Setup) -> list[dict[str, Any]]:
    """Check and measure every algorithm at every size."""
    options, rows = setup.options, []
    programs = {name: program(setup, functools.partial(call, setup, name)) for name in options.names}
    meet = functools.partial(program(setup, lambda x: collectives.psum(x, AXES)), input_of(setup, 1))
    for nbytes in options.sizes:
        multiple = setup.mesh.size if options.operation == "reduce_scatter" else 1
        size = -(-nbytes // (jnp.dtype(options.dtype).itemsize * multiple)) * multiple
        x = input_of(setup, size)
        for name in options.names:
            say(f"{nbytes} bytes, {name}")
            check(setup, name, programs[name](x), size)
            for _ in range(WARM_UP):
                jax.block_until_ready(meet())
                jax.block_until_ready(programs[name](x))
        say(f"{nbytes} bytes, {options.rounds} rounds of {', '.join(options.names)}")
        found = measure([functools.partial(programs[name], x) for name in options.names], meet, options.rounds)
        rows += [row_of(setup, name, size, found[:, :, [i, -1]]) for i, name in enumerate(options.names)]
    return rows


def say(text: str) -> None:
    """Progress, of process 0."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What is printed. sent/cost: payload over the cost's bytes, of the host that sends most and of all together."""
    lines = [("bytes", "algorithm", "ms", "predicted", "bus MB/s", "of bound", "of own", "sent/cost")]
    for row in rows:
        name = row["algorithm"] + (f" ({row['chosen']})" if row["chosen"] != row["algorithm"] else "")
        figures = [f"{row[key]:.3f}" for key in ("median_ms", "predicted_ms", "bus_mb_per_s")]
        figures += [f"{row[key]:.3f}" if key in row else "-" for key in ("of_bound", "of_own_bound")]
        both = (max, sum) if any(row.get("cost_bytes", [])) else ()
        ratios = [f"{of(row['payload_bytes']) / of(row['cost_bytes']):.3f}" for of in both]
        lines.append((str(row["bytes"]), name, *figures, " ".join(ratios) or "-"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def conditions(setup: Setup) -> dict[str, Any]:
    """All that the figures depend on."""
    options = setup.options
    virtual = {key: getattr(options, key) for key in ("rate", "burst", "congestion")} if options.virtual_hosts else None
    return {
        **measured_on(),
        "device": setup.mesh.devices.flat[0].device_kind,
        "hosts": setup.hosts,
        "virtual_hosts": virtual,
        "mesh": {axis: setup.mesh.shape[axis] for axis in AXES},
        "bits_per_s": setup.bits,
        "link": setup.link._asdict(),
        **{key: getattr(options, key) for key in ("operation", "dtype", "wire_dtype", "rounds")},
    }


def plot(setup: Setup, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time against size, one line an algorithm; dashed, the wire's bound."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(setup.options.names):
        points = zip(*((row["bytes"], row["median_ms"]) for row in rows if row["algorithm"] == name), strict=True)
        axes.plot(*points, marker="osv^D"[i % 5], markersize=4, linewidth=1.2, label=name)
    if setup.bits is not None:
        sizes = sorted({row["bytes"] for row in rows})
        axes.plot(sizes, [least(setup, size) * 1e3 for size in sizes], "k--", linewidth=1, label="bound of the wire")
    axes.set(xscale="log", yscale="log", xlabel="bytes on each device", ylabel="ms")
    axes.set_title(f"{setup.options.operation}, {setup.mesh.size} devices on {setup.hosts} hosts")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    with matplotlib.rc_context({"svg.hashsalt": "jaxdist", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


@reports_mistakes
def main(arguments: list[str]) -> int:
    """Exit status: 0, or 2 for what cannot run and for a wrong result."""
    options = parse(arguments)
    if options.virtual_hosts is not None and INTERFACE not in os.environ:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        links = {key: getattr(options, key) for key in ("rate", "burst", "congestion")}
        results = run_on_hosts(command, hosts=options.virtual_hosts, output="first", **links)
        for result in (result for result in results[1:] if result.status and not result.killed):
            print(f"host {result.host}: exit {result.status}\n{result.stderr}", end="", file=sys.stderr)
        return exit_status(results)
    with fail_alone():
        setup = start(options)
        rows = bench(setup)
    if jax.process_index() == 0:
        print(table(rows))
        if options.json is not None:
            options.json.write_text(json.dumps(conditions(setup) | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
        if options.plot is not None:
            plot(setup, rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
