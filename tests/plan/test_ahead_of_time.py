"""Steps compiled for GPUs that are not there: what is said where something is missing; and, where the extra `aot` is
installed, a small model compiled for 8 H200."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.plan.closed.memory.peak import PEAK
from jaxdist.plan.compiled import ahead_of_time
from jaxdist.plan.compiled.hardware import GPUS, get_gpu
from jaxdist.plan.compiled.memory import Footprint
from jaxdist.plan.compiled.replay import Overlap
from jaxdist.plan.report import compiled_text
from jaxdist.plan.search.choose import Predicted
from jaxdist.plan.search.cluster import gpu_cluster
from jaxdist.plan.search.confirm import confirm
from jaxdist.plan.search.seconds import Seconds
from jaxdist.plan.search.space import layout_of
from jaxdist.precision.policy import POLICIES

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.layers=8",
    "model.width=1024",
    "model.heads=8",
    "model.vocab=8192",
    "model.attention=xla",
    "data.seq_len=512",
    "data.global_batch=32",
    "mesh.data=1",
    "mesh.tensor=1",
    "mesh.fsdp=8",
    "precision.policy=bf16",
    "precision.reduce_dtype=bfloat16",
    "memory.remat=full",
    "optimizer.name=adamw",
)


def why_not() -> str | None:
    """Why nothing can be compiled ahead of time here."""
    try:
        ahead_of_time.target_config(get_gpu("h200"), ahead_of_time.plugin_library())
        ahead_of_time.check_toolkit(load_config(ROOT / "configs" / "quickstart.yaml", planned=True), "xla")
    except UserError as error:
        return str(error)
    return None


COMPILES = pytest.mark.skipif(why_not() is not None, reason=f"nothing is compiled for GPUs here: {why_not()}")


def script(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "plan.py", "--compile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ))


def test_a_mistake_is_one_line_and_status_2() -> None:
    found = script("--config", ROOT / "configs" / "quickstart.yaml", "--gpu", "h999")
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1 and not found.stdout
    assert "'h999' is not known; allowed: a100-40, a100-80, h100, h200, b200, gb200" in found.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", planned=True)
    library = tmp_path / "xla_cuda_plugin.so"
    packages = ahead_of_time.PLUGINS["jax_plugins.xla_cuda13"]
    monkeypatch.setattr(ahead_of_time, "PLUGINS", {"jax_plugins.of_nobody": packages})
    with pytest.raises(UserError, match=r"CUDA plugin is not installed; .*: python -m pip install 'jaxdist\[aot\]'"):
        ahead_of_time.plugin_library()
    monkeypatch.setattr(ahead_of_time.shutil, "which", lambda _: None)
    monkeypatch.setattr(ahead_of_time, "_plugin", lambda: (library, packages._replace(toolkit=("of-nobody",))))
    with pytest.raises(UserError, match=r"of-nobody not installed, and no CUDA toolkit; install: .*\[aot\]"):
        ahead_of_time.check_toolkit(config, "xla")
    held = packages._replace(toolkit=(), cudnn=("nor-this",))
    monkeypatch.setattr(ahead_of_time, "_plugin", lambda: (library, held))
    ahead_of_time.check_toolkit(config, "xla")
    with pytest.raises(UserError, match="cuDNN's, and nor-this not installed; .*model.attention=xla"):
        ahead_of_time.check_toolkit(config, "cudnn")
    library.write_bytes(
        b'\0gpu_device_info {\n device_description_str: "A"\n}\0more\0gpu_device_info {\n b: 1\n'
        b'}\ndevice_description_str: "NVIDIA B200"\n\0rest'
    )
    assert ahead_of_time.target_config(get_gpu("b200"), library) == (
        'gpu_device_info {\n b: 1\n}\ndevice_description_str: "NVIDIA B200"\n'
    )
    with pytest.raises(UserError, match="has no description of NVIDIA GB200; take Python 3.12 with jax 0.12"):
        ahead_of_time.target_config(get_gpu("gb200"), library)


def test_packages_are_those_of_the_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of CUDA 12 have other names; once they were asked for by those of CUDA 13."""
    (tmp_path / "xla_cuda_plugin.so").write_bytes(b"")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    there = {"nvidia-cuda-nvcc-cu12", "nvidia-cudnn-cu12", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc-cu12"}

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return "12.9"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name.endswith("cuda12") else None)
    monkeypatch.setattr(ahead_of_time, "version", version)
    monkeypatch.setattr(ahead_of_time.shutil, "which", lambda _: None)
    config = load_config(ROOT / "configs" / "quickstart.yaml", planned=True)
    ahead_of_time.check_toolkit(config, "cudnn")
    there.remove("nvidia-cudnn-cu12")
    with pytest.raises(UserError, match=r"nvidia-cudnn-cu12 not installed; install: .* 'jaxdist\[cuda12\]'"):
        ahead_of_time.check_toolkit(config, "cudnn")


def test_a_plan_without_what_compiles_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is an estimate; once the plan ended after its search."""

    def not_there(*_: Any) -> Any:
        raise UserError("--compile: a-package not installed")

    config = load_config(ROOT / "configs" / "quickstart.yaml", planned=True)
    made = gpu_cluster("h200", POLICIES["fp32"], hosts=1, per_host=8, link=None, inside=None)
    candidate = Predicted(layout_of(config), config, Seconds(1.0, 0.0, {}, 0.0, 0.0), {PEAK: 1}, 0.0)
    monkeypatch.setattr("jaxdist.plan.search.confirm._compiler", lambda *_: not_there)
    candidates, notes = confirm([candidate], made, traced=0, compiled=1, progress=print)
    assert notes == ["nothing was compiled, and memory is an estimate: a-package not installed"]
    assert candidates == [candidate]


def test_the_table_of_gpus() -> None:
    assert list(GPUS) == ["a100-40", "a100-80", "h100", "h200", "b200", "gb200"]
    for gpu in GPUS.values():
        assert gpu.source and gpu.fp8 in (0.0, pytest.approx(2 * gpu.bf16, rel=1e-3))
        assert gpu.rates.flops < gpu.bf16 and gpu.rates.network < gpu.nvlink and gpu.rates.memory == gpu.bandwidth
    assert get_gpu("h200").rates[:3] == pytest.approx((800e12, 4.8e12, 400e9), rel=1e-3)


def test_realistic_rates_are_those_of_one_h200() -> None:
    """By its shares of the maker's figures for all; its steps took as long as their replays, within 5 %."""
    one = json.loads((ROOT / "docs" / "measurements" / "one_h200.json").read_text())
    seen, rates = one["rates"], get_gpu("h200").realistic
    products = [value for name, value in seen.items() if name.startswith("gemm_")]
    assert rates.flops == pytest.approx(1e12 * sum(products) / len(products), rel=2e-3)
    assert rates.memory == pytest.approx(1e12 * seen["add_one_TBps"], rel=2e-3)
    forward = seen["attention_cudnn_b32_s1024_n16_g1_k64"]["fwd_tflops"]
    assert rates.attention == pytest.approx(1e12 * forward, rel=3e-3)
    steps = {(each["model"], each["settings"]): each["step_ms"] for each in one["steps"]["rows"]}
    replays = json.loads((ROOT / "docs" / "measurements" / "replays_one_h200.json").read_text())["steps"]
    assert len(replays) == 6
    for each in replays:
        assert each["realistic_ms"] == pytest.approx(steps[each["model"], each["settings"]], rel=0.05), each


@pytest.mark.slow
@COMPILES
def test_samples_are_not_last_in_the_memory_of_activations(tmp_path: Path) -> None:
    """The gradient of learned positions, a sum over 32 samples, made XLA:GPU put them there: see `add_bias`."""
    hlo, gpt2 = tmp_path / "step.hlo", ("model.style=gpt2", "mesh.fsdp=1", "parallel.strategy=ddp")
    found = script("--config", ROOT / "configs" / "quickstart.yaml", "--hlo", hlo, *SMALL, *gpt2)
    assert found.returncode == 0, found.stderr
    loops = [line for line in hlo.read_text().splitlines() if " while(" in line]
    carried = [line for line in loops if "bf16[32,512,1024]" in line.partition(" while(")[0]]
    assert carried and all("bf16[32,512,1024]{2,1,0}" in line for line in carried)


def test_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = get_gpu("h100")

    def of(peak: float) -> tuple[ahead_of_time.FitVerdict, str]:
        footprint = Footprint(arguments=0, outputs=0, aliased=0, temporary=int(peak), host=0)
        given: Any = (gpu, 8, 1, "xla", 1, footprint, [], None, None, 1.0, 1.0, "", 0.0, 0.0)
        planned = ahead_of_time.Planned(*given)
        return ahead_of_time.fit_verdict(footprint, gpu), compiled_text.verdict_text(planned)

    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    found, text = of(0.5 * gpu.memory)
    assert found.fits and text == "fits, with 31.64 GiB to spare of the 90% of a GPU's memory that a run takes"
    found, text = of(0.92 * gpu.memory)
    assert not found.fits and text.startswith("does not fit, by 1.58 GiB of the 90% of")
    assert text.endswith("; XLA_CLIENT_MEM_FRACTION=0.93 may be enough")
    found, text = of(0.96 * gpu.memory)
    assert not found.fits and "FRACTION" not in text
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")  # a run follows it, and so does the plan
    planned_for = gpu_cluster("h100", POLICIES["bf16"], hosts=1, per_host=8, link=None, inside=None)
    assert not of(0.6 * gpu.memory)[0].fits and planned_for.memory == 0.5 * gpu.memory


def test_what_is_assumed_between_hosts_is_said() -> None:
    gpu = get_gpu("h200")

    def said(hosts: int, network: float | None) -> bool:
        rates = compiled_text.with_network(gpu.rates, network, 0.0)
        replay = Overlap(rates, [], 0.0, 0.0, 1.0, 0, 1.0, 0.0, 0, [])
        footprint = Footprint(arguments=0, outputs=0, aliased=0, temporary=0, host=0)
        planned = ahead_of_time.Planned(gpu, 8, hosts, "xla", 1, footprint, [], replay, replay, 1.0, 1.0, "", 0.0, 0.0)
        text = compiled_text.plan_text(planned, network=network)
        assert f" {network or 400:.0f} GB/s sent" in text
        return f" {network or 400:.0f} GB/s sent, between hosts too: give --network, 0 us latency" in text

    assert said(2, None) and not said(1, None) and not said(2, 50.0) and not said(2, 400.0)


def test_the_time_of_a_step_and_what_xla_computes_again() -> None:
    """7 ms of computation and 1 of waiting, by 4 TFLOP of which 3 are the model's, on a device of 1 PFLOP/s."""
    footprint = Footprint(arguments=0, outputs=0, aliased=0, temporary=0, host=0)

    def said(again: float, copies: int) -> list[str]:
        gpu = get_gpu("h200")
        replay = Overlap(gpu.rates, [], 0.0, 1e-3, 7e-3, 0, 4e12, again, copies, [])
        slower = replay._replace(rates=gpu.realistic, compute=11e-3)
        given = (gpu, 8, 1, "xla", 1, footprint, [], replay, slower, 3e12, 1e15, "", 0.0, 0.0)
        return compiled_text.time_text(ahead_of_time.Planned(*given))

    ideal, realistic = said(0.0, 0)
    assert (
        ideal
        == "A step takes 8.0 ms by ideal rates: MFU 37.5% of 1000 TFLOP/s. Its products are 1.33 x those of the model."
    )
    assert realistic.startswith(
        "By realistic rates 12.0 ms: MFU 25.0%. Assumed: 733 TFLOP/s in products (1466 in float8,"
    )
    assert realistic.endswith(
        "241 TFLOP/s in cuDNN's attention with heads of 64 (in proportion, if wider), 2 us a kernel at least."
    )
    *_, warning = said(1e12, 62)
    assert warning.startswith("warning: memory is short, and XLA computes 62 instructions again") and "25.0%" in warning


@pytest.mark.slow
@COMPILES
def test_optimizer_state_in_host_memory(tmp_path: Path) -> None:
    out, config = tmp_path / "plan.json", ROOT / "configs" / "quickstart.yaml"
    found = script("--json", out, "--config", config, *SMALL, "memory.offload.optimizer=true")
    assert found.returncode == 0, found.stderr
    told = json.loads(out.read_text())
    moments = 8 * told["parameters"] / 8  # small leaves are not split
    assert moments < told["memory"]["host"] < 1.02 * moments
    assert moments / 2 < told["memory"]["aliased"] < 1.02 * moments / 2
    assert f"and {told['memory']['host'] / 2**20:.2f} MiB of host memory a device" in found.stdout


@pytest.mark.slow
@COMPILES
def test_a_small_model_for_8_gpus(tmp_path: Path) -> None:
    out, hlo = tmp_path / "plan.json", tmp_path / "step.hlo"
    common = ("--config", ROOT / "configs" / "quickstart.yaml", "--gpu", "h200", *SMALL)
    found = script("--hosts", 2, "--gpus-per-host", 4, "--json", out, "--hlo", hlo, *common)
    assert found.returncode == 0, found.stderr
    assert " 400 GB/s sent, between hosts too: give --network, 0 us" in found.stdout
    for text in (
        "fits, with ",
        "assumed, not measured",
        "forward   jaxdist/nn/",
        "By realistic rates ",
        "of the communication is hidden",
        "Outside of loops:",
        "In ",
    ):
        assert text in found.stdout, found.stdout
    told = json.loads(out.read_text())
    state = 12 * told["parameters"] / 8  # fp32 parameters and two moments; small leaves are not split
    assert state < told["memory"]["aliased"] < 1.02 * state
    assert told["devices"] == 8 and told["overlap"]["unknown_loops"] == 0
    sent = sum(each["wire_bytes"] for each in told["collectives"])
    assert sent == pytest.approx(told["overlap"]["wire_bytes"], rel=1e-6)
    assert 0.5 < told["overlap"]["hidden"] <= 1 and "is_scheduled=true" in hlo.read_text()[:2000]
    off = "devices.xla.flags=[--xla_gpu_enable_latency_hiding_scheduler=false]"
    control = script("--json", out, *common, "devices.xla.preset=plain", off)
    assert control.returncode == 0, control.stderr
    assert json.loads(out.read_text())["overlap"]["hidden"] < 0.05
    plain = script("--json", out, "--by-compiler", *common, "model.style=gpt2")
    assert plain.returncode == 0, plain.stderr
    told = json.loads(out.read_text())
    assert told["memory"]["aliased"] > state and {"all_gather", "reduce_scatter"} <= {
        each["op"] for each in told["collectives"]
    }
    llama = script("--by-compiler", *common, "model.style=llama")
    assert llama.returncode == 2 and "--by-compiler: plain_jax has the model of GPT-2" in llama.stderr
    wrong = script("--hosts", 3, "--gpus-per-host", 8, *common)
    assert wrong.returncode == 2 and "takes 8 GPUs; --hosts 3 --gpus-per-host 8 are 24" in wrong.stderr


@pytest.mark.slow
@COMPILES
def test_pieces_of_a_collective_matmul_travel_beside_products(tmp_path: Path) -> None:
    """XLA would merge the products of pieces into one, and send before and after it: see `nn.collective_matmul`."""
    out, layout = tmp_path / "plan.json", ("mesh.fsdp=1", "mesh.tensor=8", "data.seq_len=4096", "data.global_batch=4")
    both = ("parallel.sequence_parallel=true", "parallel.collective_matmul=true")
    found = script("--config", ROOT / "configs" / "quickstart.yaml", "--json", out, *SMALL, *layout, *both)
    assert found.returncode == 0, found.stderr
    pieces = [each for each in json.loads(out.read_text())["overlap"]["travels"] if each["op"] == "ppermute"]
    asked = 8 * 11 * 7  # layers, rings of a block with remat full, rounds
    assert 0.95 * asked < sum(each["calls"] for each in pieces) <= asked
    beside = [each for each in pieces if each["asynchronous"] and each["products"] >= 1]
    assert sum(each["calls"] for each in beside) > 0.95 * asked


@pytest.mark.slow
@COMPILES
def test_collectives_of_a_half_travel_beside_products_of_the_other(tmp_path: Path) -> None:
    out, layout = tmp_path / "plan.json", ("mesh.fsdp=1", "mesh.tensor=8", "data.seq_len=4096", "data.global_batch=4")
    shared = ("parallel.sequence_parallel=true", "parallel.prefetch=0", "model.scan_blocks=0", "memory.remat=none")
    found = []
    for split in (1, 2):
        each = script(
            *("--config", ROOT / "configs" / "quickstart.yaml", "--json", out),
            *(*SMALL, *layout, *shared, f"parallel.batch_split={split}"),
        )
        assert each.returncode == 0, each.stderr
        travels = json.loads(out.read_text())["overlap"]["travels"]
        beside = sum(each["calls"] for each in travels if each["asynchronous"] and each["products"] >= 1)
        found.append(beside / sum(each["calls"] for each in travels))
    assert found[0] < 0.35 and found[1] > 0.5, found


def test_the_mesh_takes_all_gpus() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", planned=True)
    with pytest.raises(UserError, match="data=2 fsdp=2 tensor=2 takes 8 GPUs; --hosts 3 --gpus-per-host 4 are 12"):
        ahead_of_time.mesh_of(config, "", hosts=3, gpus_per_host=4)
