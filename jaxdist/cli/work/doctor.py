"""A check of a machine or a job before it trains: versions, devices, ports, network, environment, clocks, and the
bandwidth between all pairs. To be started like train.py, on every host of the job."""

import json
import os
import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.cli.work.link_bandwidth import bandwidths, one_device_a_process, slow_links
from jaxdist.config.resolve import unused_gpus
from jaxdist.config.schema import DevicesConfig
from jaxdist.observe.environment import redact, versions
from jaxdist.processes import from_all
from jaxdist.runtime.join.environment import find_job
from jaxdist.runtime.join.join import join_job
from jaxdist.runtime.join.roll_call import MissingPeers
from jaxdist.runtime.network.addresses import host_address, host_name, port_problem
from jaxdist.runtime.start import choose_platform, count_devices, fail_alone

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
MATTERS = re.compile(
    r"(NCCL|XLA|CUDA|JAX|JAXDIST|GLOO|UCX|OMPI_COMM_WORLD|TF_GPU)_\w+|LD_LIBRARY_PATH|NVIDIA_VISIBLE_DEVICES"
    r"|SLURM_(JOB_ID|STEP_NODELIST|NTASKS|PROCID|LOCALID|STEP_TASKS_PER_NODE)|MASTER_(ADDR|PORT)"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|JOB_COMPLETION_INDEX|OMP_NUM_THREADS|\w*_proxy|\w*_PROXY"
)
# Variables that differ between the processes of a healthy job.
OWN_OF_RANK = re.compile(
    r".*RANK.*|.*PROC.*ID|SLURM_LOCALID|JOB_COMPLETION_INDEX|(CUDA|NVIDIA)_VISIBLE_DEVICES|JAX_LOCAL_DEVICE_IDS"
    r"|.*BIND_ADDRESS|JAXDIST_STOP_NOTE"
)
CLOCK_S = 1.0  # more between two clocks is a finding: time stamps in logs, checkpoints and certificates disagree
MEASURES = 5  # of each clock


def interfaces() -> dict[str, str]:
    """The network interfaces that are up, each with "1500 mtu, 10000 Mbit/s"; the rate only where the driver knows
    it."""
    found = {}
    for folder in sorted(Path("/sys/class/net").glob("*")):
        try:
            mtu = (folder / "mtu").read_text().strip()
            up = (folder / "operstate").read_text().strip() != "down"
            rate = int((folder / "speed").read_text())
        except (OSError, ValueError):
            rate = -1
        if folder.name != "lo" and up:
            found[folder.name] = f"{mtu} mtu" + (f", {rate} Mbit/s" if rate > 0 else "")
    found |= {folder.name: "InfiniBand or RoCE" for folder in sorted(Path("/sys/class/infiniband").glob("*"))}
    return found


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter for a job, without secrets."""
    names = sorted(name for name in environ if MATTERS.fullmatch(name))
    return {name: redact(f"{name}={environ[name]}").partition("=")[2] for name in names}


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """A report of this process on itself, ready for JSON."""
    local = jax.local_devices()
    return {
        "rank": jax.process_index(),
        "host": host_name(),
        "address": host_address() or "does not resolve",
        "versions": {name: version for name, version in versions(PACKAGES).items() if version is not None},
        "devices": [device.device_kind for device in local],
        "platform": local[0].platform,
        "cpus": len(os.sched_getaffinity(0)),
        "interfaces": interfaces(),
        "environment": environment_of(environ),
    }


def clock_differences() -> list[float]:
    """The seconds by which each process's clock is ahead of process 0's. The clocks are read when a barrier opens, so
    the result is right to some milliseconds. Every process must call it."""
    differences = []
    for _ in range(MEASURES):
        multihost_utils.sync_global_devices("clock")
        times = from_all(time.time())
        differences.append([each - times[0] for each in times])
    return [statistics.median(of_one) for of_one in zip(*differences, strict=True)]


def differing(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each fact in which a process differs from process 0 and should not."""
    first, lines = reports[0], []
    for report in reports[1:]:
        for kind in ("versions", "environment"):
            for name in sorted(first[kind] | report[kind]):
                mine, others = first[kind].get(name, "not there"), report[kind].get(name, "not there")
                if mine != others and not (kind == "environment" and OWN_OF_RANK.fullmatch(name)):
                    lines.append(f"{name}: {mine!r} on rank 0, {others!r} on rank {report['rank']} ({report['host']})")
        if report["devices"] != first["devices"]:
            lines.append(
                f"devices: {len(first['devices'])} x {first['devices'][0]} on rank 0,"
                f" {len(report['devices'])} x {report['devices'][0]} on rank {report['rank']}"
            )
    return lines


def addresses_shared(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each host whose name has a loopback address, or none, though there are several hosts: gloo makes the
    others connect to that address."""
    several = len({report["host"] for report in reports}) > 1
    return [
        f"host name {report['host']} (rank {report['rank']}): {report['address']}; give it an address that the"
        " other hosts reach, in DNS or /etc/hosts"
        for report in reports
        if several and (report["address"].startswith("127.") or not report["address"][0].isdigit())
    ]


def diagnose(mib: float | None, port: int | None) -> dict[str, Any]:
    """All checks of a process or job that has its devices. The result is the same on every process; `findings` are the
    faults."""
    with jax.default_device(jax.local_devices()[0]):
        reports = from_all(examine(os.environ) | {"port": port_problem(port) if port else None, "gpus": unused_gpus()})
        clocks = clock_differences()
    ends = one_device_a_process()
    job = jax.process_count() > 1
    names = [f"rank {report['rank']} ({report['host']})" for report in reports] if job else [str(end) for end in ends]
    mib = mib or (4.0 if ends[0].platform == "cpu" else 256.0)
    matrix = bandwidths(ends, mib=mib) if len(ends) > 1 else np.full((1, 1), np.nan)
    # Simulated devices share one memory: what differs there is the moment.
    links = slow_links(matrix) if job or ends[0].platform != "cpu" else []
    findings = differing(reports) + addresses_shared(reports) + [report["port"] for report in reports if report["port"]]
    findings += [
        f"clock of {name}: {seconds:+.1f} s beside rank 0's; use NTP on all hosts"
        for name, seconds in zip(names, clocks, strict=False)
        if abs(seconds) > CLOCK_S
    ]
    findings += sorted({report["gpus"] for report in reports if report["gpus"]})
    for link in links:
        between = " - ".join(names[end] for end in link.ends)
        findings.append(f"slow link of {between}: {link.mb_per_s:.4g} MB/s; usual is {link.usual:.4g}")
    return {
        "processes": reports,
        "clock_differences_s": clocks,
        "names": names,
        "message_mib": mib,
        "mb_per_s": [[None if np.isnan(value) else round(float(value), 3) for value in row] for row in matrix],
        "slow_links": [link._asdict() for link in links],
        "findings": findings,
    }


def report_text(found: Mapping[str, Any]) -> str:
    """The result of `diagnose` as text: the facts, the matrix of bandwidths, then the findings."""
    first, names = found["processes"][0], found["names"]
    kinds = sorted({kind for report in found["processes"] for kind in report["devices"]})
    count = sum(len(report["devices"]) for report in found["processes"])
    clocks = found["clock_differences_s"]
    lines = [
        f"job        {len(found['processes'])} processes on {len({r['host'] for r in found['processes']})} hosts",
        "versions   " + ", ".join(f"{name} {version}" for name, version in first["versions"].items()),
        f"devices    {count} ({', '.join(kinds)})",
        f"clocks     {max(clocks) - min(clocks):.3f} s between the two that differ most",
        "network    " + ("; ".join(f"{name}: {text}" for name, text in first["interfaces"].items()) or "none"),
    ]
    lines += [f"variable   {name}={value}" for name, value in first["environment"].items()]
    if len(names) > 1:
        lines += [f"bandwidth  MB/s, messages of {found['message_mib']:g} MiB, one pair at a time"]
        wide = max(len(name) for name in names)
        for name, row in zip(names, found["mb_per_s"], strict=True):
            lines.append(f"  {name:{wide}} ->" + "".join(f"{'-' if v is None else f'{v:.4g}':>9}" for v in row))
    return "\n".join([*lines, *(f"FINDING    {text}" for text in found["findings"] or ["none"])])


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the matrix of bandwidths."""
    from matplotlib.figure import Figure

    values = np.array([[np.nan if v is None else v for v in row] for row in found["mb_per_s"]], float)
    size = 3 + 0.5 * len(values)
    figure = Figure(figsize=(size + 1.5, size), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(values, cmap="viridis", vmin=0)
    axes.set_xticks(range(len(values)), found["names"], rotation=90)
    axes.set_yticks(range(len(values)), found["names"])
    axes.set(xlabel="receives", ylabel="sends", title="\n".join(["MB/s", *found["findings"]])[:300])
    figure.colorbar(picture)
    figure.savefig(path, dpi=100)


def run_doctor(options: Namespace) -> int:
    """Print what is found. Exit status: 0 nothing is wrong, 1 there are findings, 2 no job can be joined."""
    try:
        job = find_job(os.environ)
        devices = DevicesConfig(platform=options.platform, simulated=options.simulated)
        choose_platform(devices, in_job=job is not None)
        if job is not None:
            join_job(job)
    except MissingPeers as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with fail_alone():
        count_devices(devices, key="--platform")
        found = diagnose(options.mib, options.port)
        if jax.process_index() == 0:
            print(json.dumps(found) if options.json else report_text(found), flush=True)
            if options.plot:
                plot(found, options.plot)
    return 1 if found["findings"] else 0
