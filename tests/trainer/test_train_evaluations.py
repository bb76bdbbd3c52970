"""`train.ema`: evaluations use the average, a resumed run goes on with it, and it is part of what a run is.
`train.early_stop`: evaluations end a run, which stays ended."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.trainer.evaluation import Ending
from jaxdist.trainer.resume import check_identity
from jaxdist.trainer.train import train

YAML = """
model: {{layers: 1, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{fsdp: 4}}
parallel: {{strategy: zero2, min_shard_bytes: 0}}
train: {{steps: 4, eval_every: 2, eval_batches: 1, sample_tokens: 4}}
optimizer: {{schedule: constant}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    (tmp_path / "text.py").write_text("def f(x): return x + 1\n" * 200)
    (tmp_path / "run.yaml").write_text(YAML.format(path=tmp_path / "text.py"))
    return lambda *overrides: load_config(tmp_path / "run.yaml", overrides)


def losses(folder: Path, key: str) -> list[float]:
    return [record[key] for record in read_metrics(folder / "metrics.jsonl") if key in record]


def test_refusals(configure: Callable[..., Config], tmp_path: Path) -> None:
    """A checkpoint without an average, an older one too, is not resumed with one."""
    with pytest.raises(UserError, match=r"^train\.ema: 1\.0 is out of range; allowed: a number > 0 and < 1, or null"):
        configure("train.ema=1.0")
    now = {"train": {"seed": 0, "ema": 0.9}}
    for saved in ({"train": {"seed": 0, "ema": None}}, {"train": {"seed": 0}}):
        with pytest.raises(UserError, match=r"^train\.ema: 0\.9, but the run in .* was started with None; set it back"):
            check_identity(saved, now, tmp_path)
    assert check_identity({"train": {"seed": 0}}, {"train": {"seed": 0, "ema": None}}, tmp_path) == {}


@pytest.mark.slow
def test_evaluations_use_the_average(configure: Callable[..., Config], tmp_path: Path) -> None:
    """An average that hardly moves stays at step 0, others lie between that and the parameters. Training is the same.
    A resumed run has the bits of one that was not stopped."""
    for name, ema in (("plain", "null"), ("stays", "0.999999999"), ("usual", "0.5")):
        assert train(configure("train.steps=8", f"train.ema={ema}"), tmp_path / name) == 0
        assert losses(tmp_path / name, "loss") == losses(tmp_path / "plain", "loss")
    plain, stays, usual = (losses(tmp_path / name, "eval/loss") for name in ("plain", "stays", "usual"))
    assert stays == pytest.approx([stays[0]] * 4, rel=1e-5)
    assert plain[-1] < usual[-1] < stays[-1] - 0.05
    for steps in (4, 8):
        assert train(configure(f"train.steps={steps}", "train.ema=0.5"), tmp_path / "resumed") == 0
    assert losses(tmp_path / "resumed", "eval/loss") == usual


def test_evaluations_that_are_not_better_by_enough() -> None:
    ending = Ending(2, 0.1)
    assert [ending({"eval/loss": loss}) for loss in (3.0, 2.95, 2.8, 2.75, float("nan"))] == [False] * 5
    assert ending({"eval/loss": 2.79})
    again = Ending(3, 0.1)
    again.restore(ending.saved)
    assert (again.best, again.since, again.is_over) == (2.8, 2, False)
    again.restore({"fit": {"best": 1.0, "since": 3}})  # as older versions saved it
    assert (again.best, again.is_over) == (1.0, True)


def test_a_run_without_evaluations_cannot_end_by_them(configure: Callable[..., Config]) -> None:
    with pytest.raises(
        UserError, match=r"^train\.early_stop\.patience: 2 counts evaluations, and train\.eval_every is 0; "
    ):
        configure("train.early_stop.patience=2", "train.eval_every=0")


@pytest.mark.slow
def test_an_early_stop_of_a_configuration(
    configure: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No evaluation is lower by 10: the third is the last. Resumed, the run says so and takes no step, unless it may be
    more patient; stopped by its steps in between, it goes on counting."""
    asked = ("train.steps=20", "train.early_stop.min_delta=10", "train.early_stop.patience=2")
    line = "complete after step 6: 2 evaluations in a row without a lower eval/loss (train.early_stop)"
    for _ in range(2):
        assert train(configure(*asked), tmp_path / "run") == 0
        assert line in capsys.readouterr().out.splitlines()
        assert len(losses(tmp_path / "run", "loss")) == 6
    assert train(configure(*asked[:2], "train.early_stop.patience=3"), tmp_path / "run") == 0
    assert line.replace("step 6: 2", "step 8: 3") in capsys.readouterr().out.splitlines()
    for steps in (4, 20):
        assert train(configure(f"train.steps={steps}", *asked[1:]), tmp_path / "stopped") == 0
    assert line in capsys.readouterr().out.splitlines()
