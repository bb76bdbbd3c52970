"""The finalists of a plan, traced and compiled: what closed forms say of them is compared with the program itself."""

import math
from collections.abc import Callable

import jax

from jaxdist.build import assemble, mesh_of_config
from jaxdist.errors import UserError
from jaxdist.plan.closed.memory.peak import PEAK
from jaxdist.plan.compiled import ahead_of_time, hardware
from jaxdist.plan.compiled.memory import Footprint, batch_of, compile_step, footprint_of
from jaxdist.plan.explain import ESTIMATED_PEAK, explain
from jaxdist.plan.search.choose import Predicted
from jaxdist.plan.search.cluster import PlanCluster
from jaxdist.runtime.compiler import compiling_for, set_flags

TRACED, COMPILED = 10, 3


def confirm(
    candidates: list[Predicted], cluster: PlanCluster, *, traced: int, compiled: int, progress: Callable[[str], None]
) -> tuple[list[Predicted], list[str]]:
    """Trace the first candidates, and compile the first of these. One that does not fit then is dropped.

    traced, compiled: how many.

    Returns (the candidates that are left, in the same order, with better figures of memory; lines about what was
    compared, and what could not be compiled here).
    """
    left, notes, dropped = list[Predicted](), list[str](), 0
    compiler = _compiler(cluster, notes) if compiled else None
    for each in candidates:
        if len(left) >= max(traced, compiled):
            break
        if compiler is not None and sum(one.how == "compiled" for one in left) < compiled:
            progress(f"compiling {each.layout.name()}")
            try:
                footprint = compiler(each)
            except UserError as error:  # a package that compiling takes is not installed
                notes.append(_not_compiled(error))
                compiler = footprint = None
            if footprint is not None:
                each = each._replace(how="compiled", memory={**each.memory, PEAK: footprint.peak})
        if each.how != "compiled" and len(left) < traced:
            progress(f"tracing {each.layout.name()}")
            each = _traced(each, notes)
        if each.peak > cluster.memory:
            dropped += 1
            continue
        left.append(each)
    if dropped:
        notes.append(f"{dropped} of the first did not fit, once they were traced or compiled")
    return [*left, *candidates[len(left) + dropped :]], notes


def _traced(each: Predicted, notes: list[str]) -> Predicted:
    found = explain(each.config)
    if not math.isclose(found.ledger.wire_bytes, each.sent, rel_tol=1e-6, abs_tol=1.0):
        sent = f"{found.ledger.wire_bytes:,.0f} bytes, by closed forms {each.sent:,.0f}"
        notes.append(f"{each.layout.name()}: traced, a device sends {sent}")
    memory = {**each.memory, PEAK: found.memory[ESTIMATED_PEAK]}
    return each._replace(how="traced", memory=memory, sent=found.ledger.wire_bytes)


def _not_compiled(error: UserError) -> str:
    return f"nothing was compiled, and memory is an estimate: {str(error).removeprefix('--compile: ')}"


def _compiler(cluster: PlanCluster, notes: list[str]) -> Callable[[Predicted], Footprint | None] | None:
    """A function that compiles a candidate for the devices of the cluster; None, with a note, where that cannot be."""
    if cluster.name not in hardware.GPUS:
        here = len(jax.devices())
        if here < cluster.devices:
            notes.append(f"nothing was compiled: {cluster.devices} devices are wanted, and {here} are here")
            return None
        return _on_these_devices
    gpu = hardware.get_gpu(cluster.name)
    try:
        library = ahead_of_time.plugin_library()
        description = ahead_of_time.target_config(gpu, library)
    except UserError as error:
        notes.append(_not_compiled(error))
        return None

    def compile_for_gpus(each: Predicted) -> Footprint:
        set_flags(each.config, "gpu", started=False)
        mesh = ahead_of_time.mesh_of(each.config, description, hosts=cluster.hosts, gpus_per_host=cluster.per_host)
        with compiling_for(each.config, "gpu"):
            return ahead_of_time.compile_ahead(each.config, gpu, mesh, (gpu.rates, gpu.realistic)).footprint

    return compile_for_gpus


def _on_these_devices(each: Predicted) -> Footprint | None:
    mesh = mesh_of_config(each.config)
    parts = assemble(each.config, mesh)
    return footprint_of(compile_step(parts, batch_of(each.config, mesh)), each.config, parts)
