"""MLflow: its server, or the database that it finds by itself. Its package is imported on opening."""

import functools
import logging
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxdist.files.regular import read_regular, replace_file
from jaxdist.observe.environment import flat
from jaxdist.observe.metrics import ARRAYS, read_metrics
from jaxdist.observe.sinks.image import Image

RUN_ID = "mlflow_run_id"
RESUMED = "resumed."  # before the key of a setting that another session changed
LINES, PARAMETERS = 8, 100  # that are sent at once; MLflow takes 1000 metrics, and so many parameters
FINISH_S = 60.0  # for what is still to be sent at the end
# MLflow's own settings, where the user has not set them: by itself it asks a server that does not answer for four
# minutes, and prints the address of the run.
MLFLOW_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MLflow:
    """A sink that goes on as one run of MLflow over all sessions: its id is in the run directory.

    A thread sends, so that no step waits for a server. MLflow takes no point back, shows one that it gets twice twice,
    and lines that were still to be sent are lost with a killed process. So each session begins with those lines of
    metrics.jsonl that MLflow does not have, and a step that it has is not sent again. "step" is a metric too, by which
    it is asked.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment

    def open(self, run_dir: Path, config: str, step: int) -> None:
        """As `Sink.open`."""
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        for name, value in MLFLOW_SETTINGS.items():
            os.environ.setdefault(name, value)
        self._client: Any = MlflowClient()
        self._run = self._id(run_dir, config, new=not step)
        self._client.update_run(self._run, status="RUNNING")
        self._there = {point.step for point in self._client.get_metric_history(self._run, "step")}
        self._sender = _Sender(self._client, self._run, config)
        for record in read_metrics(run_dir / "metrics.jsonl"):
            self._put({name: value for name, value in record.items() if name != ARRAYS})

    def record(self, record: Mapping[str, float]) -> None:
        """As `Sink.record`. The time of the line is that of its points."""
        self._put(record)
        self._sender.check()

    def pictures(self, step: int, images: Mapping[str, Image]) -> None:
        """As `Sink.pictures`: files of the run, in report/."""
        with tempfile.TemporaryDirectory() as folder:
            for name, image in images.items():
                path = Path(folder) / f"{name}.png"
                path.write_bytes(image.png)
                self._client.log_artifact(self._run, str(path), "report")

    def close(self, *, failed: bool) -> None:
        """As `Sink.close`."""
        try:
            self._sender.finish()
        finally:
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")

    def _put(self, record: Mapping[str, float]) -> None:
        """Give a line to the sender, if MLflow does not have it."""
        from mlflow.entities import Metric

        step, at = int(record["step"]), int(1e3 * record.get("time", time.time()))
        if step in self._there:
            return
        self._there.add(step)
        self._sender.lines.put(
            [Metric(_allowed(name), float(value), at, step) for name, value in record.items() if name != "time"]
        )

    def _id(self, run_dir: Path, config: str, *, new: bool) -> str:
        path = run_dir / RUN_ID
        if new or not path.exists():
            experiment = self._client.get_experiment_by_name(self._experiment)
            place = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            made = self._client.create_run(place, run_name=run_dir.resolve().name).info.run_id
            replace_file(path, made.encode())
        run = read_regular(path).decode().strip()
        self._parameters(run, config)
        return run

    def _parameters(self, run: str, config: str) -> None:
        """Give MLflow the settings by their dotted keys, which it compares runs by. It changes no parameter: what a
        later session has changed becomes a tag, "resumed.train.steps"."""
        from mlflow.entities import Param, RunTag

        known, mine = self._client.get_run(run).data, flat(yaml.safe_load(config) or {})
        settings = [Param(key, str(value)) for key, value in mine.items() if key not in known.params]
        for first in range(0, len(settings), PARAMETERS):
            self._client.log_batch(run, params=settings[first : first + PARAMETERS])
        tags = [
            RunTag(f"{RESUMED}{key}", str(value))
            for key, value in mine.items()
            if key in known.params and str(value) != known.tags.get(f"{RESUMED}{key}", known.params[key])
        ]
        for first in range(0, len(tags), PARAMETERS):
            self._client.log_batch(run, tags=tags[first : first + PARAMETERS])


class _Sender:
    """A thread that sends to one run of MLflow: config.yaml, then lines. What fails is sent by the next session.

    lines: the points of each line. One that is put there is sent as soon as those before it are.
    """

    def __init__(self, client: Any, run: str, config: str) -> None:
        self.lines = queue.SimpleQueue[list[Any] | None]()
        self._failed, self._late = list[Exception](), False
        self._thread = threading.Thread(target=self._send, args=(client, run, config), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what sending has raised, once."""
        if self._failed:
            raise self._failed.pop(0)

    def finish(self) -> None:
        """Wait until all is sent. Raises what sending raised, and TimeoutError after `FINISH_S`."""
        self.lines.put(None)
        self._thread.join(FINISH_S)
        self._late = self._thread.is_alive()
        if self._late:
            raise TimeoutError(f"not everything was sent within {FINISH_S:.0f} s; the run sends it when it goes on")
        self.check()

    def _send(self, client: Any, run: str, config: str) -> None:
        if config:
            self._try(lambda: client.log_text(run, config, "config.yaml"))
        ended = False
        while not ended and not self._late:
            lines = [self.lines.get()]
            while len(lines) < LINES and not self.lines.empty():  # those that have come meanwhile
                lines.append(self.lines.get())
            ended = lines[-1] is None
            points = [point for line in lines for point in line or ()]
            self._try(functools.partial(client.log_batch, run, metrics=points))

    def _try(self, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:
            self._failed.append(error)


def _allowed(name: str) -> str:
    """A name of a metric as MLflow takes it: "acc@5" -> "acc_5"."""
    return re.sub(r"/+", "/", re.sub(r"[^\w\-. :/]", "_", name))
