"""Weights & Biases, in the folder wandb/ of a run directory. Its package is imported on opening."""

import io
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxdist.files.regular import read_regular, replace_file
from jaxdist.observe.metrics import ARRAYS, read_metrics
from jaxdist.observe.sinks.image import Image

ID_FILE = "wandb_run_id"


class WandB:
    """A sink that goes on as one run of W&B over all sessions: its id is in the run directory.

    W&B takes no point back, and a killed process loses the last seconds of what it was given. So each session begins
    with those lines of metrics.jsonl that W&B does not have. Online its server says which. Offline that is all of them:
    the file of a session holds the whole run, and those of earlier sessions are renamed, so that none is sent twice.
    """

    def __init__(self, project: str, mode: str) -> None:
        self._project = project
        self._mode: Any = mode  # a Literal of wandb, which need not be there

    def open(self, run_dir: Path, config: str, step: int) -> None:
        """As `Sink.open`."""
        import wandb

        name = self._id(run_dir, new=not step)
        for earlier in (run_dir / "wandb").glob(f"offline-run-*-{name}"):
            earlier.rename(earlier.with_name(f"earlier-{earlier.name}"))
        self._run: Any = wandb.init(
            project=self._project,
            mode=self._mode,
            id=name,
            resume="allow",
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=yaml.safe_load(config) if config else None,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                finish_timeout=60,
                finish_timeout_raises=True,
            ),
        )
        for record in read_metrics(run_dir / "metrics.jsonl"):
            if record["step"] >= self._run.starting_step:
                self.record({name: value for name, value in record.items() if name != ARRAYS})

    def record(self, record: Mapping[str, float]) -> None:
        """As `Sink.record`."""
        self._run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def pictures(self, step: int, images: Mapping[str, Image]) -> None:
        """As `Sink.pictures`. Offline no earlier ones are in the file of the session."""
        import wandb
        from matplotlib.image import imread

        made = {}
        for name, image in images.items():
            pixels = (imread(io.BytesIO(image.png)) * 255).round().astype("uint8")  # of fractions it makes black ones
            made[f"report/{name}"] = wandb.Image(pixels, caption=image.text)
        self._run.log(made, step=step)

    def close(self, *, failed: bool) -> None:
        """As `Sink.close`."""
        self._run.finish(exit_code=int(failed))

    def _id(self, run_dir: Path, *, new: bool) -> str:
        path = run_dir / ID_FILE
        if new or not path.exists():
            replace_file(path, secrets.token_hex(4).encode())
        return read_regular(path).decode().strip()
