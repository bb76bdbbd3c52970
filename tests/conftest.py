"""Eight simulated CPU devices or JAXDIST_TEST_DEVICES, strict dtype promotion, warnings are errors (pyproject.toml)."""

import gc
import os
import time
from typing import Any

import child

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=" + os.environ.get("JAXDIST_TEST_DEVICES", "8"),
        *child.FLAGS,
    ]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Programs with collectives hang or crash that jax 0.10.2 and 0.12.0.1 load on simulated devices.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import pytest
from levels import in_share

gc.set_threshold(200_000, 100, 1000)  # tracing makes many objects, and few cycles
jax.config.update("jax_numpy_dtype_promotion", "strict")


# CI has no time for all slow tests: of each commit it runs a share, such as 2/6.
SHARE = os.environ.get("JAXDIST_SLOW_SHARE", "1/1")
SAID = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A case that is marked exhaustive, of a test that is marked slow, is left out of slow runs. Of the slow ones those
    of another share are left out."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
    slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("exhaustive")]
    others = {item for item in slow if not in_share(f"{item.nodeid.partition('::')[0]}::{item.name}", SHARE)}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]
    said = f"slow tests: share {SHARE.replace('/', ' of ')}, {len(slow) - len(others)} of {len(slow)} tests"
    if hasattr(config, "workeroutput"):
        config.workeroutput["slow"] = said
    config.stash[SAID] = said


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The process that prints has collected nothing, where there are others that run the tests."""
    node.config.stash[SAID] = getattr(node, "workeroutput", {}).get("slow", "")


# CI's time is limited, and its machines differ: after this time, in seconds since 1970, no slow test begins.
DEADLINE = float(os.environ.get("JAXDIST_SLOW_TESTS_UNTIL", "inf"))
LEFT_OUT = "LEFT OUT: a slow test that had not begun by JAXDIST_SLOW_TESTS_UNTIL"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and time.time() > DEADLINE:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lines about slow tests that were left out, which would be skipped in silence."""
    if SHARE != "1/1":
        terminalreporter.write_line(terminalreporter.config.stash.get(SAID, ""))
    reports = terminalreporter.getreports("skipped")
    if count := sum(LEFT_OUT in str(report.longrepr) for report in reports):
        terminalreporter.write_line(f"{count} slow tests were LEFT OUT: CI had no time left")
    for reason in sorted({str(report.longrepr[2]) for report in reports if "SKIPPED: " in str(report.longrepr)}):
        terminalreporter.write_line(reason)


@pytest.fixture
def as_users_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that compare bits: the code generator of `child.FLAGS` for jax 0.10, and LLVM without optimization,
    round otherwise than what users get."""
    options: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
    if not child.NEW_COMPILER:
        options["xla_cpu_use_fusion_emitters"] = True
    jit = jax.jit

    def compiled(*arguments: Any, compiler_options: Any = None, **keywords: Any) -> Any:
        return jit(*arguments, compiler_options=options | (compiler_options or {}), **keywords)

    monkeypatch.setattr(jax, "jit", compiled)
