"""The sinks of a run together: each gets what metrics.jsonl gets, and none of them can end the run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from jaxdist.config.sections.observe import ObserveConfig
from jaxdist.observe.console import error_text
from jaxdist.observe.sinks.image import Image
from jaxdist.observe.sinks.mlflow import MLflow
from jaxdist.observe.sinks.tensorboard import TensorBoard
from jaxdist.observe.sinks.wandb import WandB

Warn = Callable[[dict[str, Any]], None]


class Sink(Protocol):
    """One place that records go to."""

    def open(self, run_dir: Path, config: str, step: int) -> None:
        """Begin, or begin again after a `close`. metrics.jsonl has been cut by then.

        run_dir: where it may write, and where metrics.jsonl is.
        config: the configuration as YAML; "" where there is none.
        step: the run goes on after this step, and what is there of later ones must not count any more; 0: a new run
        """

    def record(self, record: Mapping[str, float]) -> None:
        """Take a line of metrics.jsonl, with its "step"."""

    def pictures(self, step: int, images: Mapping[str, Image]) -> None:
        """Take the charts of the report, by name, in place of those of an earlier end of the run.

        step: the last one, which is recorded
        """

    def close(self, *, failed: bool) -> None:
        """End, so that all of it can be read. failed: whether the run has."""


class Sinks:
    """The sinks that a configuration asks for. What fails in one is said once, counted, and said again at the end.

    warn: is called with a record of incidents.jsonl
    """

    def __init__(self, sinks: Mapping[str, Sink] | None = None, warn: Warn = print) -> None:
        self._made, self._warn = dict(sinks or {}), warn
        self._open: list[str] = []
        self._failed: dict[str, int] = {}
        self.run_failed = False  # what `close` tells the sinks
        self._given: tuple[Path, str] = Path(), ""

    def open(self, run_dir: Path, config: str, step: int) -> Self:
        """Open each. One that cannot be opened is said, and gets nothing."""
        self._given = run_dir, config
        self._open = [name for name in self._made if self._do(name, 0, lambda sink: sink.open(run_dir, config, step))]
        return self

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give a line to each that is open."""
        for name in self._open:
            self._do(name, step, lambda sink: sink.record({"step": step, **metrics}))

    def __bool__(self) -> bool:
        """Whether any is open."""
        return bool(self._open)

    def pictures(self, step: int, images: Mapping[str, Image]) -> None:
        """Give the charts of the report to each that is open."""
        for name in self._open:
            self._do(name, None, lambda sink: sink.pictures(step, images))

    def rewind(self, step: int) -> None:
        """Go on after this step: what was recorded of later ones must not count any more."""
        self.close()
        self.open(*self._given, step)

    def close(self) -> None:
        """Close each, and say how often it failed."""
        for name in self._open:
            self._do(name, None, lambda sink: sink.close(failed=self.run_failed))
            if self._failed.get(name, 0) > 1:
                what = f"observe.{name}: failed {self._failed[name]} times; metrics.jsonl has every step"
                self._warn({"what": what, "action": "went on"})
        self._open, self._failed = [], {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.run_failed |= kind is not None and issubclass(kind, Exception)  # not where the user interrupts it
        self.close()

    def _do(self, name: str, step: int | None, call: Callable[[Sink], None]) -> bool:
        """Call a sink. Whatever fails there, in its package, disk or network, is said and is not the run's failure."""
        try:
            call(self._made[name])
            return True
        except Exception as error:
            self._failed[name] = self._failed.get(name, 0) + 1
            if self._failed[name] == 1:
                at = "at the end" if step is None else f"at step {step}; the run goes on"
                at = at if step != 0 else "the run goes on without it"
                what = f"observe.{name}: {error_text(error)}; {at}"
                self._warn({"what": what, "action": "went on"})
            return False


def make_sinks(observe: ObserveConfig, warn: Warn) -> Sinks:
    """The sinks that a configuration asks for, not opened yet."""
    sinks: dict[str, Sink] = {}
    if observe.tensorboard:
        sinks["tensorboard"] = TensorBoard()
    if observe.wandb.project is not None:
        sinks["wandb"] = WandB(observe.wandb.project, observe.wandb.mode)
    if observe.mlflow is not None:
        sinks["mlflow"] = MLflow(observe.mlflow)
    return Sinks(sinks, warn)
