"""A run with replicas: the time of its steps, its header, and how it is resumed."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.config.sections.local import LocalConfig, OuterConfig
from jaxdist.errors import UserError
from jaxdist.local_sgd.step import LocalStep
from jaxdist.observe import read_metrics
from jaxdist.trainer.header import describe_local
from jaxdist.trainer.train import train

pytestmark = pytest.mark.xdist_group("local_run")  # the finished run is shared

YAML = """
model: {{layers: 2, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{data: 2}}
parallel: {{strategy: ddp, local: {{every: 3}}}}
train: {{steps: 6, eval_every: 3, eval_batches: 2, sample_tokens: 0}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""
SLEPT = 1.0  # seconds of each outer step
Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.py").write_text("def x(y):\n    return y + 1\n" * 400)
    (folder / "run.yaml").write_text(YAML.format(path=folder / "text.py"))
    return lambda *overrides: load_config(folder / "run.yaml", overrides)


@pytest.fixture(scope="module")
def finished(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, whose outer steps are slow."""
    outer = LocalStep.outer

    def slow(self: LocalStep, index: int, state: Any) -> Any:
        function = outer(self, index, state)

        def call(*given: Any) -> Any:
            time.sleep(SLEPT)
            return function(*given)

        call.trace = function.trace  # type: ignore[attr-defined]
        return call

    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStep, "outer", slow)
        assert train(configure(), folder) == 0
    return folder


@pytest.mark.slow
def test_the_time_of_a_step_includes_the_outer_step_that_follows_it(finished: Path) -> None:
    records = read_metrics(finished / "metrics.jsonl")
    assert [record["step"] for record in records if record["step_s"] > SLEPT][1:] == [3, 6]  # the first one compiles
    for record in records:
        assert record["tokens_per_s"] == pytest.approx(8 * 16 / record["step_s"])
    spent = records[-1]["time"] - records[0]["time"]
    left_out = sum(record["time/eval"] + record["time/save"] for record in records[1:])
    assert sum(record["step_s"] for record in records[1:]) == pytest.approx(spent - left_out, abs=0.2)


@pytest.mark.slow
def test_a_resumed_run_says_when_its_last_evaluation_was(
    finished: Path, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    assert train(configure("train.eval_every=0"), tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "held-out text: " in said and "evaluated after" not in said  # no step was left to take
    assert "local SGD  2 replicas, outer step every 3 steps (nesterov, lr 1, momentum 0)\n" in said
    assert " MiB a device (anchor, parameters and optimizer)\n" in said
    with pytest.raises(UserError, match=r"^parallel\.local\.outer\.momentum: 0\.5, but the run in .* had 0\.0, and"):
        train(configure("parallel.local.outer.momentum=0.5"), tmp_path / "run")
    assert train(configure("train.eval_every=0", "train.steps=7"), tmp_path / "run") == 0
    assert " bits per byte (evaluated after step 6, not since), " in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_evaluates_an_anchor_in_host_memory(
    finished: Path, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses are those of a run without, and each can go on where the other was."""
    keys = ["parallel.local.offload=true", "train.sample_tokens=4", "observe.report=true"]
    assert train(configure(*keys), tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert " MiB a device in host memory\n" in said and "(anchor," not in said
    assert "offload    without effect" in said  # as for any offload on CPUs

    def losses(folder: Path) -> list[tuple[float, float | None]]:
        return [(record["loss"], record.get("eval/loss")) for record in read_metrics(folder / "metrics.jsonl")]

    assert losses(tmp_path / "run") == losses(finished)
    assert train(configure("train.steps=9", "train.eval_every=3"), tmp_path / "run") == 0
    assert "held-out text: " in capsys.readouterr().out


def test_the_header_says_how_replicas_meet_and_what_has_no_use() -> None:
    plain = LocalConfig(every=10)
    said = describe_local(plain, 4, 60)
    assert said == "4 replicas, outer step every 10 steps (nesterov, lr 1, momentum 0)"
    assert describe_local(plain, 1, 60).splitlines()[1:] == [
        "warning: mesh.data is 1: a replica alone has no other to meet"
    ]
    assert describe_local(plain, 4, 9).splitlines()[1:] == [
        "warning: parallel.local.every is 10, train.steps is 9: replicas meet after the last step only"
    ]
    outer = OuterConfig("sgd", 0.7, 0.9)
    whole = LocalConfig(every=4, outer=outer, fragments=2, keep=0.5, algorithm="ring", wire_dtype="int8")
    assert describe_local(whole, 2, 4) == (
        "2 replicas, outer step every 4 steps (sgd, lr 0.7, momentum 0.9), 2 fragments, keep 0.5, sent by ring (int8)"
    )
