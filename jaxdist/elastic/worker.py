"""What a worker does: a jaxdist job with a mesh and an optimizer of its own, that takes steps from given parameters.

Nothing in the job knows of servers. A plain class: a Ray actor is made of it in `jaxdist.elastic.run`, and a replay
makes several in one process. jax is imported by `first`: the process gets the platform that the configuration names.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.elastic.log import worker_index
from jaxdist.elastic.server import bounds
from jaxdist.errors import UserError

_SEEDS = 1 << 31


class WorkerJob(NamedTuple):
    """What the workers of a process share: the configuration, the parts that were built of it, the data, the mesh."""

    config: Any
    parts: Any
    source: Any
    mesh: Any


class Done(NamedTuple):
    """A round: its number (clock), the mean loss of its steps, and what it moved the parameters by, start - end."""

    clock: int
    loss: float
    moved: np.ndarray


def check_job(config: Any) -> None:
    """Raise `UserError` for what a worker cannot do: keep parameters beside those that servers know."""
    for key, value, off in (
        ("parallel.local.every", config.parallel.local.every, "0"),
        ("train.ema", config.train.ema, "null"),
    ):
        if value:
            raise UserError(
                f"{key}: {value} does not go with jaxdist elastic, whose servers hold the model; allowed: {off}"
            )


@cache  # once a process: the step is compiled for all workers in it
def make_job(text: str) -> WorkerJob:
    """Start jax as a configuration (its YAML) says, and build its parts. Raises `UserError`."""
    import jax

    from jaxdist.build import assemble, mesh_of_config
    from jaxdist.config.load import load_config
    from jaxdist.plan.auto_remat import start_fitting
    from jaxdist.trainer.batches.load import load_data

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        config = load_config(path)
        check_job(config)
        config = start_fitting(config)
    if jax.process_count() > 1:
        raise UserError("elastic: a worker is one process, which may have several devices; start no job around it")
    mesh = mesh_of_config(config)
    return WorkerJob(config, assemble(config, mesh), load_data(config), mesh)


def config_text(path: Path) -> str:
    """The configuration beside a log, as YAML. Raises `UserError`."""
    from jaxdist.config.load import load_config, to_yaml

    return to_yaml(load_config(path))


def _first_state(job: WorkerJob) -> Any:
    from jaxdist.trainer.first_state import first_state

    return first_state(job.config, job.parts, job.mesh, lambda line: None)[0]


def _flat(params: Any) -> np.ndarray:
    """All numbers of a tree, in its order."""
    import jax

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    if len(kinds := sorted({str(leaf.dtype) for leaf in leaves})) > 1 or kinds[0] not in ("float32", "float64"):
        raise UserError(
            f"precision: parameters are kept in {', '.join(kinds)}; allowed with jaxdist elastic: a precision that"
            " keeps all of them in float32, as fp32 and bf16 do"
        )
    return np.concatenate([leaf.ravel() for leaf in leaves])


class Worker:
    """A worker: its own optimizer state and its own order of the data, both of which depend on its name only.

    Args:
        name: As "w3".
        text: The configuration as YAML.
        period: Steps of a round.
    """

    def __init__(self, name: str, text: str, period: int) -> None:
        self.name, self.text, self.period, self.clock = name, text, period, 0
        self._evaluator: Any = None

    def first(self) -> None:
        """Start jax, and compile the step, so that no round waits. Raises `UserError`: the configuration is wrong."""
        import jax

        self.job = make_job(self.text)
        self.state = _first_state(self.job)
        self._loader = self._make_loader()
        copy = jax.tree.map(lambda leaf: leaf.copy(), self.state)  # the step takes the buffers of its state
        jax.block_until_ready(self.job.parts.step(copy, self._loader.batch(0)))

    def twin(self, name: str) -> "Worker":
        """Another worker in this process, at its beginning. This one must be at its own."""
        import jax

        assert self.clock == 0
        made = Worker(name, self.text, self.period)
        made.job, made.state = self.job, jax.tree.map(lambda leaf: leaf.copy(), self.state)
        made._loader = made._make_loader()
        return made

    def _make_loader(self) -> Any:
        """The batches of the configuration, in an order of this worker's own."""
        from dataclasses import replace

        from jaxdist.trainer.batches.load import loader_of

        job, train = self.job, self.job.config.train
        seed = (train.seed + 1_000_003 * (1 + worker_index(self.name))) % _SEEDS
        return loader_of(replace(job.config, train=replace(train, seed=seed)), job.source, job.mesh)

    def numbers(self) -> np.ndarray:
        """The parameters that a run begins with, alike for all workers."""
        return _flat(self.state.params)

    def work(self, flat: np.ndarray) -> Done:
        """A round: `period` steps from these parameters. Raises `UserError` where training has failed."""
        from jaxdist.precision.loss_scale import is_halted

        self._load(flat)
        losses = []
        for _ in range(self.period):
            self.state, metrics = self.job.parts.step(self.state, self._loader.batch(int(self.state.step)))
            losses.append(float(metrics["loss"]))
        if bool(is_halted(self.state.guard, self.job.parts.options.max_skips)):
            raise UserError(
                f"optimizer.lr: {self.name} has no finite loss or gradient in round {self.clock}, at"
                f" {self.job.config.optimizer.lr:g}; allowed: a smaller one, or train.on_nonfinite=skip"
            )
        done = Done(self.clock, float(np.mean(losses)), flat - _flat(self.state.params))
        self.clock += 1
        return done

    def work_in_parts(self, *parts: np.ndarray) -> tuple[Any, ...]:
        """A round between servers: ((clock, loss), and what it moved of each part)."""
        done = self.work(np.concatenate(parts))
        cuts = bounds(done.moved.size, len(parts))
        return (done.clock, done.loss), *(done.moved[begin:end] for begin, end in cuts)

    def evaluate(self, *parts: np.ndarray) -> float | None:
        """The loss of these parameters on the held-out data; None with `train.eval_every=0`."""
        from jaxdist.runtime.watch.watchdog import Watch
        from jaxdist.trainer.evaluation import Evaluator
        from jaxdist.trainer.run import RunPlan

        if self.job.config.train.eval_every == 0:
            return None
        self._load(np.concatenate(parts))
        if self._evaluator is None:
            self._evaluator = Evaluator(
                RunPlan(self.job.config, self.job.mesh, self.job.source, self.job.parts), Watch()
            )
        return float(self._evaluator(self.state)["eval/loss"])

    def beat(self) -> None:
        """A sign of life, which another thread gives while `work` runs."""

    def _load(self, flat: np.ndarray) -> None:
        import jax

        leaves, tree = jax.tree.flatten(self.state.params)
        cuts = np.cumsum([leaf.size for leaf in leaves])
        assert flat.shape == (cuts[-1],), (flat.shape, cuts[-1])
        pieces = np.split(flat, cuts[:-1])
        new = [
            jax.device_put(piece.reshape(leaf.shape), leaf.sharding) for piece, leaf in zip(pieces, leaves, strict=True)
        ]
        self.state = self.state._replace(params=jax.tree.unflatten(tree, new))
