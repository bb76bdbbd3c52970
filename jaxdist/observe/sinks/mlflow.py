"""MLflow: its server, or the database that it finds by itself. Its package is imported on opening."""

import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxdist.files.regular import read_regular, replace_file
from jaxdist.observe.metrics import ARRAYS, read_metrics
from jaxdist.observe.sinks.image import Image

RUN_ID = "mlflow_run_id"
UNDER_WAY = 100  # lines that may be on their way to MLflow
PARAMETERS = 100  # that MLflow takes at once


class MLflow:
    """A sink that goes on as one run of MLflow over all sessions: its id is in the run directory.

    MLflow takes no point back, shows one that it gets twice twice, and a killed process loses the last lines that were
    on their way. So each session begins with those lines of metrics.jsonl that MLflow does not have, and a step that it
    has is not sent again. "step" is a metric too, by which it is asked.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment

    def open(self, run_dir: Path, config: str, step: int) -> None:
        """As `Sink.open`."""
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client: Any = MlflowClient()
        self._sent = deque[Any]()
        self._run = self._id(run_dir, config, new=not step)
        self._client.update_run(self._run, status="RUNNING")
        if config:
            self._client.log_text(self._run, config, "config.yaml")
        self._there = {point.step for point in self._client.get_metric_history(self._run, "step")}
        for record in read_metrics(run_dir / "metrics.jsonl"):
            self.record({name: value for name, value in record.items() if name != ARRAYS})

    def record(self, record: Mapping[str, float]) -> None:
        """As `Sink.record`. The time of the line is that of its points."""
        from mlflow.entities import Metric

        step, at = int(record["step"]), int(1e3 * record.get("time", time.time()))
        if step in self._there:
            return
        self._there.add(step)
        points = [Metric(name, float(value), at, step) for name, value in record.items() if name != "time"]
        self._sent.append(self._client.log_batch(self._run, metrics=points, synchronous=False))
        self._wait(UNDER_WAY)

    def pictures(self, step: int, images: Mapping[str, Image]) -> None:
        """As `Sink.pictures`: files of the run, in report/."""
        with tempfile.TemporaryDirectory() as folder:
            for name, image in images.items():
                path = Path(folder) / f"{name}.png"
                path.write_bytes(image.png)
                self._client.log_artifact(self._run, str(path), "report")

    def close(self) -> None:
        """As `Sink.close`."""
        self._wait(0)
        self._client.set_terminated(self._run, "FINISHED")

    def _wait(self, left: int) -> None:
        """Wait until so many lines are under way. Raises what sending them raised."""
        while len(self._sent) > left:
            self._sent.popleft().wait()

    def _id(self, run_dir: Path, config: str, *, new: bool) -> str:
        path = run_dir / RUN_ID
        if new or not path.exists():
            experiment = self._client.get_experiment_by_name(self._experiment)
            place = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            made = self._client.create_run(place, run_name=run_dir.resolve().name).info.run_id
            self._parameters(made, config)
            replace_file(path, made.encode())
        return read_regular(path).decode().strip()

    def _parameters(self, run: str, config: str) -> None:
        """Give MLflow the settings by their dotted keys, which it compares runs by."""
        from mlflow.entities import Param

        settings = [Param(key, str(value)) for key, value in _by_dotted_keys(yaml.safe_load(config) or {})]
        for first in range(0, len(settings), PARAMETERS):
            self._client.log_batch(run, params=settings[first : first + PARAMETERS])


def _by_dotted_keys(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _by_dotted_keys(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
