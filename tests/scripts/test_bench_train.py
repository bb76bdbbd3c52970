"""`scripts/bench/train.py`: contenders compute the same, take turns, and are compared by what is written."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child import QUICK, ROOT, environment
from harness import race as racing
from harness.task import SIZES, Contender, Task, flops_per_token, make_task, parameters, set_products

from jaxdist.errors import UserError
from jaxdist.plan.compiled.hardware import get_gpu, gpu_of

TASK = Task(SIZES["toy"], None, {}, [], False, "fp32")  # type: ignore[arg-type]
ORDER: list[str] = []


def fake(name: str, loss: float = 2.0) -> Any:
    def make(task: Task) -> Contender:
        def step(i: int) -> tuple[float, float]:
            ORDER.append(name)
            return loss / (i + 1), 1.0

        return Contender(step, lambda: None, {})

    return make


one, two, other = fake("one"), fake("two"), fake("other", 2.1)


def crowded(task: Task) -> Contender:
    if len(set(ORDER)) > 1:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    return fake("crowded")(task)


def broken(task: Task) -> Contender:
    raise ValueError("no such thing")


def run_race(*names: str, steps: int = 4, left: float = 100.0) -> Any:
    ORDER.clear()
    names = tuple(f"test_bench_train.{name}" for name in names)
    return racing.race(TASK, names, steps=steps, burst=2, left_s=lambda: left, say=lambda text: None)


def test_contenders_take_turns_and_each_goes_first() -> None:
    results, speed = run_race("one", "two")
    assert [len(result.seconds) for result in results] == [4, 4]
    assert ORDER.count("one") == ORDER.count("two") == racing.FIRST + 2 * (racing.WARM - 1 + 4)
    assert ORDER[4:12] == ["one", "one", "two", "two", "two", "two", "one", "one"]
    assert set(speed) == {"test_bench_train.two"}


def test_no_time_left_ends_the_race_with_equally_many_rounds() -> None:
    results, _ = run_race("one", "two", steps=100, left=0.0)
    counts = [len(result.seconds) for result in results if not result.failed]
    assert counts and counts[0] < 100 and len(set(counts)) == 1


def test_other_losses_are_an_error() -> None:
    results, _ = run_race("one", "two")
    racing.check_equal(results, "bf16")
    results, _ = run_race("one", "other")
    with pytest.raises(UserError, match="first loss 2.1"):
        racing.check_equal(results, "bf16")


def test_one_without_memory_beside_the_others_runs_again_with_the_first() -> None:
    calls: list[tuple[str, ...]] = []
    freed: list[list[str]] = [[]]  # before the first heat, after it, after the second
    heat = racing.heat
    torch = SimpleNamespace(
        compiler=SimpleNamespace(reset=lambda: freed[-1].append("compiled")),
        cuda=SimpleNamespace(empty_cache=lambda: freed[-1].append("memory")),
    )

    def watched(task: Task, names: Any, **options: Any) -> Any:
        calls.append(tuple(name.rpartition(".")[2] for name in names))
        freed.append([])
        ORDER.clear()
        return heat(task, names, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(racing, "heat", watched)
        patch.setitem(sys.modules, "torch", torch)
        patch.setattr(racing.gc, "collect", lambda: freed[-1].append("objects"))
        results, speed = run_race("one", "two", "crowded", "broken")
    assert calls == [("one", "two", "crowded", "broken"), ("one", "crowded")]
    assert freed == [[], ["compiled", "objects", "memory"], []]
    assert not results[2].failed and "test_bench_train.crowded" in speed
    assert results[3].failed == "ValueError: no such thing"


def test_figures_are_what_they_say() -> None:
    size = SIZES["124m"]
    assert parameters(size) == 124_475_904  # 124,439,808 of GPT-2, and 47 rows of the table
    assert flops_per_token(size) == 6 * 124_475_904 + 12 * 12 * 768 * 1024
    result, gpu = racing.Result("a", [0.1, 0.3, 0.2], [3.0], [1.0], {}, 1.0, None, None), get_gpu("h100")
    found = racing.summary(result, size, gpu)
    assert math.isclose(found["tokens_per_s"], 32 * 1024 / 0.2)
    assert math.isclose(found["mfu"], found["tokens_per_s"] * flops_per_token(size) / 989.4e12)
    assert racing.summary(result, size, None)["mfu"] is None
    names = {"NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA GB200": "gb200", "NVIDIA A100-SXM4-80GB": "a100-80"}
    assert all(gpu_of(kind) == get_gpu(name) for kind, name in names.items())
    assert not any(map(gpu_of, ("cpu", "", "NVIDIA H100 PCIe", "NVIDIA H20")))


def test_fp32_is_multiplied_as_fp32() -> None:
    key = "jax_default_matmul_precision"
    before = jax.config.values[key]
    try:
        for precision, want in (("bf16", before or "default"), ("fp32", "highest")):
            assert set_products(precision) == want
            text = jax.jit(jnp.dot).lower(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)).as_text()
            assert ("HIGHEST" in text) == (want == "highest")
    finally:
        jax.config.update(key, before)


@pytest.mark.slow
def test_ids_follow_a_rule_with_noise() -> None:
    batch = make_task(SIZES["toy"], gpu=False, precision="fp32").batches[0]
    assert (batch["inputs"][:, 1:] == batch["targets"][:, :-1]).all()
    assert set(np.unique((batch["targets"] - 5 * batch["inputs"] - 17) % 256)) == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_script_measures_equal_steps_on_a_cpu(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    command = [sys.executable, "scripts/bench/train.py", "--steps", "3", "--json", str(out), "--plot", str(picture)]
    command += ["--sizes", "toy,toy_llama"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | QUICK, timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 1000
    for result, missing in zip(
        json.loads(out.read_text(encoding="utf-8"))["sizes"], ((), ("plain_flax",)), strict=True
    ):
        assert result["matmul_precision"] == "highest" and result["differs"] == ""
        failed = {each["name"]: each["failed"] for each in result["contenders"] if "failed" in each}
        raced = {each["name"] for each in result["contenders"]} - set(failed)
        assert failed.keys() - {"pytorch"} == set(missing), failed
        assert raced >= {"jaxdist", "jaxdist_as_trained", "plain_jax"}
        assert set(result["speed_of_first_over"]) == raced - {"jaxdist"}


@pytest.mark.slow
def test_bench_step_measures_both_steps_and_what_a_call_takes(tmp_path: Path) -> None:
    """The overhead of jaxdist's step beside plain JAX's: no program is compiled again, and its calls are timed beside
    those of a program that does nothing."""
    small = ("model.layers=2", "model.width=32", "model.heads=2", "data.seq_len=16", "data.global_batch=4")
    command = [sys.executable, "scripts/bench/step.py", "--steps", "3", "--json", str(tmp_path / "out.json"), *small]
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | QUICK, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["recompilations"] == 0 and found["steps"] == 3
    for name, seconds in found["seconds"].items():
        assert 0 < seconds["call"] <= seconds["step"] and seconds["processor"] >= 0, name
    jaxdist, plain = (found["seconds"][name]["step"] for name in ("jaxdist", "plain"))
    assert found["ratio"] == pytest.approx(plain / jaxdist)
    assert found["seconds"]["empty"]["step"] < min(jaxdist, plain)
    assert "a call returns after" in done.stdout and "an empty program with as many arrays" in done.stdout
