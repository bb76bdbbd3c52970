"""The trace of a few steps: what its items are, and the refusals."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxdist.cli.runs.profile import main
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.trainer.measures.clock import Clock
from jaxdist.trainer.measures.profile import Profile, longest, own_times, trace_of
from jaxdist.trainer.train import train

CONFIG = """
model: {{layers: 1, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
train: {{steps: 6, eval_every: 0, sample_tokens: 0}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false, profile: {{start: 3, steps: 2}}}}
"""


class Event(NamedTuple):
    name: str
    start_ns: float
    duration_ns: float


def configuration(folder: Path) -> Path:
    (folder / "text.py").write_text("def f(x): return x + 1\n" * 200)
    (folder / "run.yaml").write_text(CONFIG.format(path=folder / "text.py"))
    return folder / "run.yaml"


def test_time_of_its_own() -> None:
    """That of events inside is not counted twice; one that begins where another ends is not inside it."""
    events = [Event("inner", 2e9, 3e9), Event("outer", 0, 10e9), Event("innermost", 3e9, 1e9), Event("next", 10e9, 2e9)]
    assert own_times(events) == [("outer", 7.0), ("inner", 2.0), ("innermost", 1.0), ("next", 2.0)]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("set observe.profile.start, such as observe.profile.start=10\n")
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("is no folder; give the directory of a run\n")
    assert main([str(tmp_path), "--top", "0"]) == 2
    assert capsys.readouterr().err.endswith("--top: 0; allowed: an integer >= 1\n")
    with pytest.raises(
        UserError, match=r"start 3 with 5 steps ends after train.steps 6; allowed: a start of at most 2"
    ):
        load_config(configuration(tmp_path), ["observe.profile.steps=5"])


@pytest.mark.slow
def test_trace_of_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps that were asked for, no others; the run says its longest items, and the command says them again."""
    assert train(load_config(configuration(tmp_path)), tmp_path / "run") == 0
    said = capsys.readouterr().out
    items = longest(trace_of(tmp_path / "run"), 1000)
    calls = sum(item.calls for item in items if item.name == "PjitFunction(step)")
    assert calls in (2, 4)  # newer jax has two events for a call
    for line in {item.line for item in items}:
        assert sum(item.share for item in items if item.line == line) == pytest.approx(1)
    assert main([str(tmp_path / "run")]) == 0
    table = capsys.readouterr().out.split("\n", 1)[1]
    assert "the 10 longest items" in table and table.strip() in said


def test_a_failed_step_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The state was used up by the step that failed: the trace is ended all the same, and nothing else is raised."""
    config, ended, state = load_config(configuration(tmp_path)), [], jnp.zeros(2)
    state.delete()
    parts = {"plan": SimpleNamespace(config=config), "progress": SimpleNamespace(state=state)}
    profile = Profile(SimpleNamespace(**parts), Clock(1))  # type: ignore[arg-type]
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: ended.append(True))
    profile._tracing = True
    with pytest.raises(MemoryError), closing(profile):
        raise MemoryError
    assert ended == [True]
