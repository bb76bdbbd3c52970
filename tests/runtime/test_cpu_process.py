"""A process that computes on CPUs: its freed memory stays with it, and its threads do not interrupt each other."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from child import environment
from levels import levels

from jaxdist.runtime import cpu_process

ARRAYS = """
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        numpy.ones(2**24)  # 128 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
PREPARED = f"""
import json, os, resource, threading
import numpy
from jaxdist.config.schema import DevicesConfig
from jaxdist.runtime import start
{ARRAYS}
before = faults()
start.choose_platform(DevicesConfig(platform="cpu", simulated=SIMULATED), in_job=IN_JOB)
faults()
policies = []
thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(json.dumps([before, faults(), policies[0] == os.SCHED_BATCH]))
"""


def prepared(simulated: int, *, in_job: bool, more: Mapping[str, str]) -> Any:
    """Page faults of allocations before and after a process was prepared, and whether a new thread has SCHED_BATCH."""
    program = PREPARED.replace("SIMULATED", str(simulated)).replace("IN_JOB", str(in_job))
    environ = environment() | {"JAX_PLATFORMS": "cpu"} | more
    return json.loads(
        subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True).stdout
    )


@pytest.mark.parametrize(
    ("simulated", "in_job", "more", "kept"),
    levels(
        [
            (1, False, {}, True),
            (1, True, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, True),  # about something else
            (2, False, {}, False),
            (1, False, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, False),
            (1, True, {"MALLOC_MMAP_THRESHOLD_": "33554432"}, False),
            (1, False, {"MALLOC_ARENA_MAX": "2"}, False),
        ],
        everyday=2,
    ),
)
def test_freed_memory_stays(simulated: int, in_job: bool, more: dict[str, str], kept: bool) -> None:
    """Freed memory is reused without a page fault, where there is one device and the environment leaves it open."""
    before, after, batch = prepared(simulated, in_job=in_job, more=more)
    assert before > 200  # 256 huge pages of 2 MiB, if not more small ones
    assert after < 20 if kept else after > 200
    assert batch == in_job


@pytest.mark.parametrize(
    ("largest", "asked"),
    [
        (2**30, [(-3, 2**28), (-8, 1), (-1, 2**30)]),
        (2**25, [(-3, 2**28), (-3, 2**25), (-8, 1), (-1, 2**30)]),  # glibc before 2.35
        (0, [(-3, 2**28), (-3, 2**25)]),
    ],
)
def test_glibc_may_refuse(largest: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a large threshold for arrays nothing else is set: it would fix that threshold at 128 KiB."""
    calls = []

    def mallopt(parameter: int, value: int) -> bool:
        calls.append((parameter, value))
        return parameter != -3 or value <= largest

    monkeypatch.setattr(cpu_process.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    cpu_process.keep_freed_memory({})
    assert calls == asked


def test_a_chosen_policy_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `chrt -i 0 jaxdist train`."""
    set_to = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda process, policy, parameters: set_to.append(policy))
    for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
        monkeypatch.setattr(os, "sched_getscheduler", lambda process, policy=policy: policy)
        cpu_process.avoid_interruptions()
    assert set_to == [os.SCHED_BATCH]


def test_a_system_may_forbid_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or not have it. The process goes on with its own."""
    asked = []

    def forbidden(process: int, *arguments: object) -> None:
        asked.append(process)
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", lambda process: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    cpu_process.avoid_interruptions()
    monkeypatch.delattr(os, "sched_setscheduler")  # as on other systems
    cpu_process.avoid_interruptions()
    assert asked == [0]
