"""Reports of a step that was compiled ahead of time: as text, and as JSON."""

import math
from collections import defaultdict
from typing import Any

import jax

from jaxdist.config.schema import Config
from jaxdist.plan.compiled.ahead_of_time import Planned, fit_verdict
from jaxdist.plan.compiled.replay import Overlap, Rates, Travel, by_loop
from jaxdist.plan.compiled.sinks import sinks
from jaxdist.plan.report.text import memory_table
from jaxdist.plan.traced.sharding import aligned
from jaxdist.runtime.gpu_memory import VARIABLE
from jaxdist.specs import format_bytes

MOST = 0.95  # of a GPU's memory: CUDA, NCCL and cuBLAS need some of it
HEADINGS = ("op", "dtype", "n", "a call", "calls", "", "needs", "meanwhile", "products", "waits", "what")


def plan_text(planned: Planned, *, rows: int = 12, network: float | None = None) -> str:
    """The report of a compiled step: memory with the verdict, collectives, overlap.

    rows: how many collectives of each loop, the longest waits first, and source lines; 0: all
    network: as given to `with_network`
    """
    gpu, footprint = planned.gpu, planned.footprint
    level = str(jax.config.values["jax_optimization_level"]).replace("UNKNOWN", "XLA's own")
    head = (
        f"Compiled for {planned.devices} x {gpu.description}, which are not here: {planned.parameters:,}"
        f" parameters, attention {planned.attention}, jax {jax.__version__}, optimization level {level};"
        f" traced in {planned.lower_s:.1f} s, compiled in {planned.compile_s:.1f} s"
    )
    text = [head, "", *memory_table(memory_rows(planned)), verdict_text(planned)]
    if footprint.host:
        text.append(f"and {format_bytes(footprint.host)} of host memory a device")
    apart = planned.hosts > 1 and network is None
    text += [
        "",
        *_collectives(planned),
        "",
        *overlap_text(planned.overlap, rows=rows, apart=apart),
        "",
        *sinks_text(planned, rows=rows),
        "",
        *time_text(planned),
    ]
    return "\n".join(text)


def sinks_text(planned: Planned, *, rows: int = 12) -> list[str]:
    """The lines of a table: the source lines that take longest by realistic rates. rows: how many; 0: all."""
    found = sinks(planned.realistic.kernels, planned.text)
    if not found:
        return []
    whole = sum(each.seconds for each in found)
    lines = [
        (
            f"{each.seconds * 1e3:.2f} ms",
            f"{each.seconds / whole:.1%}",
            each.calls,
            each.kind,
            each.phase,
            each.line or "?",
        )
        for each in found[: rows or None]
    ]
    share = sum(each.seconds for each in found[: rows or None]) / whole
    return [
        f"Where {whole * 1e3:.1f} ms of computation go, by realistic rates: {share:.0%} in {len(lines)} of {len(found)}"
        " source lines (a fused kernel counts for the line of its result):",
        *aligned([("time", "share", "kernels", "kind", "phase", "line"), *lines], right=(0, 1, 2)),
    ]


def time_text(planned: Planned) -> list[str]:
    """The time of a step by both sets of rates, what is computed for it, and whether XLA is short of memory."""
    found, real = planned.overlap, planned.realistic
    text = [
        f"A step takes {found.seconds * 1e3:.1f} ms by ideal rates: MFU {planned.utilisation(found):.1%} of"
        f" {planned.peak / 1e12:.0f} TFLOP/s. Its products are {found.flops / planned.needed:.2f} x those of the"
        " model.",
        f"By realistic rates {real.seconds * 1e3:.1f} ms: MFU {planned.utilisation(real):.1%}. Assumed:"
        f" {_rates_text(real.rates)}.",
    ]
    if found.copies:
        text.append(
            f"warning: memory is short, and XLA computes {found.copies} instructions again in place of keeping their"
            f" results, {found.flops_again / found.flops:.1%} of the products: a memory.remat that keeps less may be"
            " faster"
        )
    return text


def memory_rows(planned: Planned) -> dict[str, int]:
    """{purpose: bytes of one device}."""
    each = planned.footprint
    return {
        "arguments (state, batch)": each.arguments,
        "temporary (gradients, copies, activations)": each.temporary,
        "outputs (new state, metrics)": each.outputs,
        "outputs that take arguments' place": each.aliased,
        "peak": each.peak,
        f"there is ({planned.gpu.description})": planned.gpu.memory,
    }


def verdict_text(planned: Planned) -> str:
    """One line: fits or not, by how much."""
    found = fit_verdict(planned.footprint, planned.gpu)
    basis = f"of the {found.share:.0%} of a GPU's memory that a run takes"
    if found.fits:
        return f"fits, with {format_bytes(found.spare)} to spare {basis}"
    enough = math.ceil(100 * found.needed + 1) / 100
    more = f"; {VARIABLE}={enough:.2f} may be enough" if enough <= MOST else ""
    return f"does not fit, by {format_bytes(-found.spare)} {basis}{more}"


def _collectives(planned: Planned) -> list[str]:
    """The lines of a table of all that a device sends: by op, dtype and size of the group."""
    totals: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0, 0.0])
    for each in planned.collectives:
        if each.group_size > 1:
            total = totals[each.op, each.dtype, each.group_size]
            total[0] += each.calls
            total[1] += each.wire_bytes
    most_first = sorted(totals.items(), key=lambda item: -item[1][1])
    lines = [(*kind, f"{calls:.0f}", format_bytes(sent)) for kind, (calls, sent) in most_first]
    sent, ideal = sum(each[1] for each in totals.values()), 6 * planned.parameters
    share = f", {sent / ideal:.3f} x 6 bytes a parameter" if sent else ""
    return [
        f"A device sends {format_bytes(sent)} a step{share}:",
        *aligned([("op", "dtype", "n", "calls", "sent"), *lines], right=(2, 3, 4)),
    ]


def overlap_text(found: Overlap, *, rows: int = 12, apart: bool = False) -> list[str]:
    """The lines of a replay: the assumed rates, the shares, and the collectives by the loop they are in.

    apart: whether to say that the rate inside a host is assumed between hosts too
    """
    rates, between = found.rates, ", between hosts too: give --network" if apart else ""
    text = [
        "Overlap, by a replay of the compiled schedule; assumed, not measured, are ideal rates:"
        f" {_rates_text(rates, between)}, one stream for each",
        f"{found.hidden:.1%} of the communication is hidden: {found.communication * 1e3:.2f} ms of it beside"
        f" {found.compute * 1e3:.1f} ms of computation by these rates, {found.stall * 1e3:.2f} ms waited for;"
        f" synchronous in loops: {len(found.synchronous_in_loops)}",
    ]
    if found.unknown_loops:
        text.append(f"{found.unknown_loops} loops of unknown length count as one round")
    for loop, travels in by_loop(found, lambda each: each.group_size > 1).items():
        text.append(f"In {' x '.join(map(str, loop))} rounds:" if loop else "Outside of loops:")
        shown = travels[: rows or None]
        text += [f"  {line}" for line in aligned([HEADINGS, *map(_row, shown)], right=(2, 3, 4, 6, 7, 8, 9))]
        if rest := travels[len(shown) :]:
            waited = sum(each.stall * each.calls for each in rest)
            text.append(f"  ... and {len(rest)} more, {waited * 1e6:.0f} us waited for")
    return text


def _rates_text(rates: Rates, between: str = "") -> str:
    """In words. between: what to say of the network's rate."""
    others = {"float8": rates.fp8, "float32": rates.tf32}
    named = ", ".join(f"{rate / 1e12:.0f} in {name}" for name, rate in others.items() if rate)
    text = (
        f"{rates.flops / 1e12:.0f} TFLOP/s in products{named and f' ({named})'}, {rates.memory / 1e12:.2f} TB/s of"
        " memory, "
        f"{rates.network / 1e9:.0f} GB/s sent{between}, {rates.latency * 1e6:.0f} us latency"
    )
    if rates.attention is not None:
        text += (
            f", {rates.attention / 1e12:.0f} TFLOP/s in cuDNN's attention with heads of 64 (in proportion, if wider)"
        )
    return text + (f", {rates.least * 1e6:.0f} us a kernel at least" if rates.least else "")


def _row(each: Travel) -> tuple[object, ...]:
    kind = "async" if each.asynchronous else "SYNC"
    needs, meanwhile, waits = (f"{s * 1e6:.0f} us" for s in (each.needed, each.between, each.stall * each.calls))
    what = "/".join(each.name.rstrip(")").split("/")[-3:])[-70:]
    call = (each.op, each.dtype, each.group_size, format_bytes(each.wire_bytes), each.calls, kind)
    return (*call, needs, meanwhile, f"{each.products:.0f}", waits, what)


def plan_to_json(planned: Planned, config: Config) -> dict[str, Any]:
    """The report as JSON: {"gpu", "devices", "memory", "fits", "spare_bytes", "collectives", "overlap", ...}.

    All seconds in "overlap" follow from the rates in "assumed".
    """
    found, replay = fit_verdict(planned.footprint, planned.gpu), planned.overlap
    same = ("devices", "hosts", "attention", "parameters", "lower_s", "compile_s")
    return {
        "gpu": planned.gpu.description,
        **{name: getattr(planned, name) for name in same},
        "jax": jax.__version__,
        "optimization_level": str(jax.config.values["jax_optimization_level"]),
        "memory": planned.footprint._asdict() | {"peak": planned.footprint.peak, "capacity": planned.gpu.memory},
        "fits": found.fits,
        "model_flops": planned.needed,
        "mfu": planned.utilisation(replay),
        "realistic": {
            "assumed": planned.realistic.rates._asdict(),
            "step_s": planned.realistic.seconds,
            "stall_s": planned.realistic.stall,
            "mfu": planned.utilisation(planned.realistic),
            "sinks": [each._asdict() for each in sinks(planned.realistic.kernels, planned.text)],
        },
        "spare_bytes": found.spare,
        "collectives": [each._asdict() for each in planned.collectives if each.group_size > 1],
        "overlap": {
            "assumed": replay.rates._asdict(),
            "hidden": replay.hidden,
            "wire_bytes": replay.wire_bytes,
            "communication_s": replay.communication,
            "stall_s": replay.stall,
            "compute_s": replay.compute,
            "step_s": replay.seconds,
            "flops": replay.flops,
            "flops_again": replay.flops_again,
            "instructions_again": replay.copies,
            "unknown_loops": replay.unknown_loops,
            "synchronous_in_loops": len(replay.synchronous_in_loops),
            "synchronous": sum(not each.asynchronous for each in replay.travels),
            "travels": [each._asdict() for each in replay.travels],
        },
        "batch": {"global": config.data.global_batch, "length": config.data.seq_len},
    }


def with_network(rates: Rates, network: float | None, latency: float | None) -> Rates:
    """The rates, with a user's own, where given. network: GB/s sent. latency: microseconds."""
    return rates._replace(
        network=network * 1e9 if network else rates.network,
        latency=rates.latency if latency is None else latency * 1e-6,
    )
