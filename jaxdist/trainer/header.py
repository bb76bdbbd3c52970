"""The header of a run on the console: model, data, mesh, parallelism, memory."""

import json
import math
import platform
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.config.entries import ModelFacts
from jaxdist.config.resolve import warmup_of
from jaxdist.config.rules.fields import show
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.local import LOCAL, LocalConfig
from jaxdist.mesh import has_host_memory, on_cpu, sizes_text
from jaxdist.model import ModelDef
from jaxdist.observe import redact, redact_settings
from jaxdist.optim import leave_out
from jaxdist.parallel.grad_sync import order_of_work
from jaxdist.plan.compiled.memory import resident_bytes
from jaxdist.processes import from_all
from jaxdist.runtime.cache import cache_row
from jaxdist.runtime.rank_names import name_ranks
from jaxdist.specs import STACKED, leaves_by_name
from jaxdist.trainer.run import RunPlan, TrainingRun


def plural(word: str, count: int) -> str:
    """The English plural of a noun in -s, -h or anything else: processes, microbatches, devices."""
    return word if count == 1 else word + ("es" if word.endswith(("s", "h")) else "s")


def describe_sync(sync: GradSync) -> str:
    """Such as "ring" or "ring (int8)" or "ordered (8 virtual shards)"."""
    if sync.deterministic:
        return f"ordered ({sync.virtual_shards} virtual shards)"
    return sync.algorithm + (f" ({sync.wire_dtype})" if sync.wire_dtype else "")


def describe_local(local: LocalConfig, replicas: int, steps: int) -> str:
    """Such as "4 replicas, outer step every 10 steps (nesterov, lr 1, momentum 0)", and a line for what has no use.

    steps: of the whole run.
    """
    outer, every = local.outer, f"{local.every} {plural('step', local.every)}"
    text = f"{replicas} {plural('replica', replicas)}, outer step every {every}"
    text += f" ({outer.name}, lr {outer.lr:g}, momentum {outer.momentum:g})"
    text += f", {local.fragments} fragments" if local.fragments > 1 else ""
    text += f", keep {local.keep:g}" if local.keep else ""
    if local.algorithm != "native":
        text += f", sent by {local.algorithm}" + (f" ({local.wire_dtype})" if local.wire_dtype else "")
    if replicas == 1:
        text += "\nwarning: mesh.data is 1: a replica alone has no other to meet"
    elif local.every > steps:
        text += (
            f"\nwarning: {LOCAL}.every is {local.every}, train.steps is {steps}: replicas meet after the last step only"
        )
    return text


def with_commas(number: int | None) -> str:
    """Such as "10,855,127"; "?" for the length of a stream that does not say it."""
    return "?" if number is None else f"{number:,}"


def describe_ranks(mesh: Mesh, hosts: Sequence[str]) -> str:
    """Ranks, hosts, devices, and which axes of the mesh cross them.

    "4 ranks on 2 hosts (0-1 on a; 2-3 on b), 2 devices each; mesh: fsdp between hosts; data between processes of a
    host".
    """
    ranks_of = {name: [rank for rank, each in enumerate(hosts) if each == name] for name in dict.fromkeys(hosts)}
    places = [f"{name_ranks(group).partition(' ')[2]} on {name}" for name, group in ranks_of.items()]
    shown = "; ".join(places[:4]) + (f"; and {len(places) - 4} more" if len(places) > 4 else "")
    process = np.vectorize(lambda device: device.process_index)(mesh.devices)
    counts = np.unique(np.unique(process, return_counts=True)[1]).tolist()
    each = f"{counts[0]} {plural('device', counts[0])}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} devices"
    host = np.unique(np.array(hosts), return_inverse=True)[1][process]
    links, rest = list[str](), list(mesh.axis_names)  # rest: axes that cross nothing looked at so far
    for place, between in ((host, "hosts"), (process, "processes of a host")):
        crossing = [axis for axis in rest if np.diff(place, axis=mesh.axis_names.index(axis)).any()]
        rest = [axis for axis in rest if axis not in crossing]
        if crossing:
            links.append(f"{', '.join(crossing)} between {between}")
    number = len(places)
    return f"{len(hosts)} ranks on {number} {plural('host', number)} ({shown}), {each} each; mesh: " + (
        "; ".join(links) or "no axis between processes"
    )


def yardsticks(run: TrainingRun) -> tuple[str, dict[str, float]]:
    """The unit in which evaluations tell the loss, and what models that count pairs and triples reach in it: bits per
    byte; of other tokens, whose lengths differ, nats per token as the loss is."""
    if run.plan.source.info["unit"] == "bytes":
        return "bits per byte", dict(run.baselines)
    return "nats per token", {name: mark * math.log(2) for name, mark in run.baselines.items()}


def _marks(results: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {result:.3f}" for name, result in results.items())


def _trained(plan: RunPlan) -> str:
    """How many parameters are trained, where some are frozen: ", 32,768 of them trained"."""
    order, frozen = plan.parts.order, plan.config.optimizer.frozen
    if not frozen:
        return ""
    blocks = int(order.max()) + 1 if len(order) else 1  # a pipeline's rows may be padding
    leaves = leaves_by_name(leave_out(plan.parts.target.params, frozen))
    count = sum(
        leaf.size // len(order) * blocks if len(order) and name.startswith(f"{STACKED}.") else leaf.size
        for name, leaf in leaves.items()
    )
    return f", {count:,} of them trained"


def _name(plan: RunPlan) -> str:
    """What the model is. A loss of the user's own has not the sizes of a GPT, whose options it is given."""
    given = plan.config.model
    own = not isinstance(plan.parts.model, ModelDef) and type(given) is type(ModelConfig())
    return given.name if own else given.describe()


def describe(run: TrainingRun) -> dict[str, str]:
    """The rows of the header, by name."""
    plan, progress = run.plan, run.progress
    config, mesh, parts, info = plan.config, plan.mesh, plan.parts, plan.source.info
    parallel = config.parallel
    sync, remat = parts.options.grad_sync, parts.options.remat
    schedule, microbatches = order_of_work(sync, mesh, parallel.schedule, parallel.microbatches)
    kind = "simulated CPU" if on_cpu(mesh) else mesh.devices.flat[0].device_kind
    idle = jax.device_count() - mesh.size
    anchor = parallel.local.on and not parallel.local.offload
    near, far = resident_bytes(parts.target) / 2**20, resident_bytes(parts.target, on_host=True) / 2**20
    rows = {
        "run": str(run.outputs.folder),
        "model": f"{_name(plan)}, {parts.model.parameters:,} parameters{_trained(plan)}",
        "data": f"{info['name']}: {with_commas(info['train'])} {info['unit']} to train on in {info['files']} files, "
        f"{with_commas(info['held_out'])} held out in {info['held_out_files']} files, sha256 {info['sha256'][:16]}"
        + "".join(f"\n{line}" for line in info.get("lines", ())),
        "mesh": f"{sizes_text(mesh.shape)} ({mesh.size} {kind} {plural('device', mesh.size)}, "
        f"{jax.process_count()} {plural('process', jax.process_count())}{f', {idle} more idle' if idle else ''})",
        "parallel": f"{parallel.strategy}, {schedule}, {microbatches} {plural('microbatch', microbatches)}, "
        f"{describe_sync(parallel.grad_sync)} reductions, {config.precision.policy}"
        + (f", attention by {form}" if (form := getattr(parts.model, "context", None)) else "")
        + (", prefetching" if parts.options.prefetch else "")
        + (f", remat {remat if isinstance(remat, str) else show(remat)}" if remat != "none" else ""),
        "state": f"{near:.2f} MiB a device ({'anchor, ' if anchor else ''}parameters and optimizer)"
        + (f", {far:.2f} MiB a device in host memory" if far else ""),
    }
    asked, steps = config.optimizer.warmup_steps, config.train.steps
    if parallel.local.on:
        rows["local SGD"] = describe_local(parallel.local, mesh.shape["data"], steps)
    if (warmup := warmup_of(asked, steps)) != asked:
        rows["warm-up"] = f"{warmup} {plural('step', warmup)} in place of {asked}: train.steps is {steps}"
    if ModelFacts.of(config.model.name).kernels:
        kernel, why = parts.attention
        rows["attention"] = kernel + (f", because {why}" if why else "")
    if (config.memory.offload.optimizer or parallel.local.offload) and (on_cpu(mesh) or not has_host_memory(mesh)):
        rows["offload"] = f"without effect: {kind} devices have no host memory beside their own"
    if cache := cache_row(config.devices.compilation_cache, jax.default_backend(), run.cache.count):
        rows["cache"] = cache
    if jax.process_count() > 1:
        rows["job"] = describe_ranks(mesh, from_all(platform.node()))
    if run.baselines:
        measure, marks = yardsticks(run)
        rows["to beat"] = f"{_marks(marks)} {measure} on the held-out text"
    elif (yardstick := plan.source.yardstick) is not None and jax.process_index() == 0:
        rows["to beat"] = f"{_marks(yardstick.compute())} {yardstick.measure}"
    if progress.first_step:
        new = [
            f"\n{key} {json.dumps(redact_settings(now, key))} (was {json.dumps(redact_settings(before, key))})"
            for key, (before, now) in progress.changed.items()
        ]
        rows["resumed"] = f"after step {progress.first_step}{', with' if new else ''}{''.join(new)}"
    return {name: redact(row) for name, row in rows.items()}
