"""Settings of the compiler: flags reach XLA before it starts, unknown ones are refused before it aborts."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest
from child import ROOT

from jaxdist import build
from jaxdist.build import assemble
from jaxdist.config.checks import prefetches, unrolls
from jaxdist.config.load import load_config
from jaxdist.config.rules.xla_flags import check_flags
from jaxdist.config.schema import Config, DevicesConfig, MeshConfig, ParallelConfig, XlaConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh
from jaxdist.runtime import compiler
from jaxdist.runtime.compiler import (
    DETERMINISTIC,
    FLOAT8,
    PRESETS,
    Setting,
    compiling_for,
    resolve,
    set_flags,
    set_options,
    settings,
    why_refused,
)

LIMIT = "--xla_gpu_experimental_parallel_collective_overlap_limit"
ADVICE = [  # of docs/compiler.md
    f"{LIMIT}=2",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
]
NEW_ADVICE = "--xla_gpu_pipeline_all_gather=on"  # of jax 0.11 and later
SETTINGS = [*DETERMINISTIC, *FLOAT8, *(each for preset in PRESETS.values() for each in preset)]


def config(*flags: str, preset: str = "fast", deterministic: bool = False, fsdp: int = 1, **parallel: Any) -> Config:
    options = ParallelConfig(grad_sync=GradSync(deterministic=deterministic), **parallel)
    return Config(devices=DevicesConfig(xla=XlaConfig(preset, flags)), parallel=options, mesh=MeshConfig(fsdp=fsdp))


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.delenv("JAX_OPTIMIZATION_LEVEL", raising=False)
    return monkeypatch


def test_the_installed_compiler_knows_every_flag_of_the_tables() -> None:
    flags = [f"{each.name}={each.value}" for each in SETTINGS if each.name.startswith("--")]
    assert why_refused([*flags, *ADVICE]) is None and all(each.reason and each.source for each in SETTINGS)
    refusal = why_refused([NEW_ADVICE])
    assert refusal is None if jax.__version_info__ >= (0, 11) else "unknown" in (refusal or "")


def test_the_page_has_every_setting() -> None:
    page = (ROOT / "docs" / "compiler.md").read_text(encoding="utf-8")
    names = [each.name for each in SETTINGS] + [flag.partition("=")[0] for flag in (*ADVICE, NEW_ADVICE)]
    assert [name for name in names if f"`{name}" not in page] == []


def test_the_environment_wins_over_flags_and_flags_over_the_preset() -> None:
    preset = (Setting("--xla_a", "1", "", ""), Setting("--xla_b", "1", "", ""), Setting("jax_option", "1", "", ""))
    assert resolve(preset, (), "") == ["--xla_a=1", "--xla_b=1"]
    assert resolve(preset, ("--xla_b=2", "--xla_c"), "") == ["--xla_a=1", "--xla_b=2", "--xla_c"]
    assert resolve(preset, ("--xla_b=2", "--xla_c"), "--xla_b=3  --xla_a") == ["--xla_c"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("xla_a=1",), "'xla_a=1' is no flag"),
        (("--xla_a=1 --xla_b",), "without spaces"),
        (("--help",), "no flag"),
        (("--xla_a=1", "--xla_b", "--xla_a"), "--xla_a is given 2 times"),
    ],
)
def test_what_is_no_flag(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(UserError, match=rf"devices\.xla\.flags: .*{text}"):
        check_flags(flags)
    check_flags(("--xla_a=1,2", "--xla_b"))


def test_flags_are_added_to_those_of_the_environment(env: pytest.MonkeyPatch) -> None:
    set_flags(config(f"{LIMIT}=2", "--xla_cpu_enable_fast_math=true"), "cpu", started=False)
    assert settings()["xla_flags"] == ["--xla_cpu_enable_fast_math=false", f"{LIMIT}=2"]


@pytest.mark.parametrize("preset", ["fast", "plain"])
def test_deterministic_sums_have_deterministic_kernels(preset: str, env: pytest.MonkeyPatch) -> None:
    wanted, flag = config(preset=preset, deterministic=True), "--xla_gpu_deterministic_ops=true"
    before = settings()["xla_flags"]
    set_flags(wanted, "cpu", started=False)
    set_flags(config(preset=preset), "gpu", started=False)
    assert settings()["xla_flags"] == before
    with pytest.raises(UserError, match=rf"^parallel\.grad_sync\.deterministic: true needs {flag} .* put it into XLA_"):
        set_flags(wanted, "gpu", started=True)
    set_flags(wanted, "gpu", started=False)
    assert settings()["xla_flags"] == [*before, flag]
    set_flags(wanted, "gpu", started=True)


@pytest.mark.parametrize("preset", ["fast", "plain"])
def test_float8_takes_no_products_from_triton(preset: str, env: pytest.MonkeyPatch) -> None:
    wanted = replace(config(preset=preset), precision=PrecisionConfig("fp8"))
    before = settings()["xla_flags"]
    set_flags(wanted, "cpu", started=False)
    set_flags(config(preset=preset), "gpu", started=False)
    set_flags(wanted, "gpu", started=True)  # too late for more than the step's own options
    assert settings()["xla_flags"] == before
    set_flags(wanted, "gpu", started=False)
    assert settings()["xla_flags"] == [*before, "--xla_gpu_enable_triton_gemm=false"]


def test_flags_of_the_environment_are_no_mistake_after_the_start(env: pytest.MonkeyPatch) -> None:
    """Though more would have been set before it."""
    env.setenv("XLA_FLAGS", f"{LIMIT}=2")
    set_flags(replace(config(f"{LIMIT}=2"), precision=PrecisionConfig("fp8")), "gpu", started=True)
    with pytest.raises(UserError, match=r"^devices\.xla\.flags: --xla_other=1, but JAX has started"):
        set_flags(replace(config(f"{LIMIT}=2", "--xla_other=1"), precision=PrecisionConfig("fp8")), "gpu", started=True)


def test_simulated_devices_keep_their_defaults(env: pytest.MonkeyPatch) -> None:
    env.setattr(compiler, "why_refused", lambda flags: pytest.fail("nothing to try"))
    before = settings()
    set_flags(config(), "cpu", started=False)
    set_options(config(), "cpu")
    assert settings() == before


@pytest.mark.parametrize(
    ("flags", "given", "text"),
    [
        ((f"{LIMIT}=2", "--xla_gpu_nonsense=1"), "", "does not know --xla_gpu_nonsense=1, or not this value"),
        (("--xla_gpu_autotune_level=maybe",), "", "does not know --xla_gpu_autotune_level=maybe, or not this value"),
        ((f"{LIMIT}=2",), "--xla_mistyped=1", r"XLA_FLAGS: '--xla_mistyped=1' .*abort on it \(unknown: --xla_mistyped"),
    ],
)
def test_what_would_abort_is_refused(flags: tuple[str, ...], given: str, text: str, env: pytest.MonkeyPatch) -> None:
    env.setenv("XLA_FLAGS", given)
    with pytest.raises(UserError, match=text):
        set_flags(config(*flags), "cpu", started=False)
    assert os.environ["XLA_FLAGS"] == given


def test_flags_that_come_too_late_are_refused(env: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="JAX has started its devices"):
        set_flags(config(f"{LIMIT}=2"), "gpu", started=True)
    set_flags(config(), "gpu", started=True)


@pytest.fixture
def level() -> Iterator[None]:
    before = jax.config.values["jax_optimization_level"]
    yield
    jax.config.update("jax_optimization_level", before)


@pytest.mark.parametrize(
    ("changes", "backend", "want"),
    [
        ({}, "gpu", "O1"),
        ({"prefetch": 1}, "gpu", "UNKNOWN"),
        ({"preset": "plain"}, "gpu", "UNKNOWN"),
        ({}, "cpu", "UNKNOWN"),
        ({"strategy": "zero3", "fsdp": 8}, "gpu", "UNKNOWN"),
        ({"strategy": "zero3", "fsdp": 8, "prefetch": 0}, "gpu", "O1"),
    ],
)
def test_optimization_level(
    changes: dict[str, Any], backend: str, want: str, level: None, env: pytest.MonkeyPatch
) -> None:
    set_options(config(**changes), backend)
    assert settings()["optimization_level"] == want


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ("", True),
        ("mesh.fsdp=-1", True),
        ("mesh.fsdp=4 mesh.data=2", True),
        ("memory.remat=full", True),
        ("parallel.strategy=zero2", False),
        ("mesh.fsdp=1 mesh.data=8", False),
        ("memory.remat=sqrt", False),
        ("memory.remat=offload", False),
        ("model.scan_blocks=2", False),
        ("parallel.reshard_after_forward=false", False),
        ("parallel.schedule=gpipe mesh.pipe=2 mesh.fsdp=4", False),
        ("parallel.grad_sync.deterministic=true optimizer.name=adamw", False),
        ("parallel.prefetch=0", False),
        ("parallel.schedule=jaxdist.parallel.schedules.gpipe.gpipe mesh.pipe=2 mesh.fsdp=4", False),
    ],
)
def test_zero3_prefetches_on_gpus_unless_something_excludes_it(changes: str, want: bool) -> None:
    """What is refused with prefetch: 1 is done without it where nobody asked for it."""
    usual = ("mesh.data=1", "mesh.tensor=1", "mesh.fsdp=8", "parallel.strategy=zero3")
    chosen = load_config(ROOT / "configs" / "quickstart.yaml", [*usual, *changes.split()])
    assert prefetches(chosen, gpu=True) is want and not prefetches(chosen, gpu=False)
    asked = replace(chosen, parallel=replace(chosen.parallel, prefetch=1))
    assert prefetches(asked, gpu=False)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ("", True),
        ("parallel.strategy=ddp model.layers=32", True),
        ("parallel.strategy=zero3", True),
        ("parallel.microbatches=2 memory.remat=none", True),
        ("mesh.fsdp=8", False),
        ("mesh.data=2", False),
        ("model.layers=33", False),
        ("mesh.tensor=2", False),
        ("parallel.schedule=gpipe mesh.pipe=2", False),
        ("memory.remat=sqrt", False),
        ("parallel.grad_sync.deterministic=true optimizer.name=adamw", False),
        ("model.scan_blocks=1", False),
        ("model={name: resnet}; data={source: digits}", False),
    ],
)
def test_few_blocks_have_no_loop_on_one_gpu_unless_something_excludes_it(changes: str, want: bool) -> None:
    usual = ("mesh.data=1", "mesh.tensor=1", "mesh.fsdp=1", "parallel.strategy=zero2")
    chosen = load_config(
        ROOT / "configs" / "quickstart.yaml", [*usual, *(changes.split("; ") if "; " in changes else changes.split())]
    )
    assert unrolls(chosen, gpu=True) is want and not unrolls(chosen, gpu=False)


@pytest.mark.parametrize(("given", "elsewhere", "on_gpus"), [("null", None, 0), ("1", 1, 1), ("2", 2, 2)])
def test_an_assembled_model_has_the_loop_that_is_chosen(
    given: str, elsewhere: int | None, on_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = load_config(
        ROOT / "configs" / "quickstart.yaml", ["mesh={data: 1, fsdp: 1, tensor: 1}", f"model.scan_blocks={given}"]
    )
    mesh = abstract_mesh()
    assert assemble(chosen, mesh).model.scan_blocks == elsewhere
    monkeypatch.setattr(build, "has_cuda_plugin", lambda: True)
    assert assemble(chosen, mesh).model.scan_blocks == on_gpus


def test_a_level_that_was_set_stays(level: None, env: pytest.MonkeyPatch) -> None:
    jax.config.update("jax_optimization_level", "O2")
    set_options(config(), "gpu")
    assert settings()["optimization_level"] == "O2"


def test_each_of_several_configurations_has_its_own_level(level: None, env: pytest.MonkeyPatch) -> None:
    """A planner compiles one layout that prefetches after another that does not."""
    with compiling_for(config(), "gpu"):
        assert settings()["optimization_level"] == "O1"
    assert settings()["optimization_level"] == "UNKNOWN"


def test_flags_in_a_file_are_not_dropped(env: pytest.MonkeyPatch) -> None:
    """XLA takes a value that does not begin with "-" for the name of a file of flags."""
    env.setenv("XLA_FLAGS", "/etc/xla.flags")
    with pytest.raises(UserError, match="XLA_FLAGS: '/etc/xla.flags' names a file"):
        set_flags(config("--xla_cpu_enable_fast_math=true"), "cpu", started=False)
    assert os.environ["XLA_FLAGS"] == "/etc/xla.flags"


def test_a_trial_that_cannot_be_made_refuses_nothing(env: pytest.MonkeyPatch) -> None:
    env.setattr(compiler, "FLAG_PROBE", "import time; time.sleep(60)")
    env.setattr(compiler, "FLAG_PROBE_S", 0.1)
    assert why_refused(["--xla_no_such_flag=1"]) is None
    env.setattr(compiler, "FLAG_PROBE", "raise SystemExit(1)")
    env.setattr(compiler, "FLAG_PROBE_S", 60)
    compiler.check_known(["--xla_no_such_flag=1"], "")
