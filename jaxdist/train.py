"""The training run behind `scripts/train.py`: loop, and leave a run directory that tells the whole story.

The loop never waits for the device: batches are made ahead by a thread, metrics are read one step late.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.agree import from_first
from jaxdist.config import Config, to_yaml
from jaxdist.data import Loader, MixedLoader, make_loader, prefetch
from jaxdist.errors import UserError
from jaxdist.evaluate import make_sampler
from jaxdist.evaluator import Evaluator
from jaxdist.incidents import NonFinite, Spikes, is_bad, look_into, roll_back, skip_line, write_down
from jaxdist.mesh import batch_shards, sizes_of
from jaxdist.observe import LayoutRow, read_metrics, write_report
from jaxdist.optim import learning_rates
from jaxdist.runtime.memory import advise, is_out_of_memory
from jaxdist.runtime.start import fail_alone, start
from jaxdist.runtime.stop import STOPPED, StopSignal
from jaxdist.saving import all_saved, begin_save, settle
from jaxdist.session import Run, build, describe, forward_parts, run_environment
from jaxdist.specs import bytes_per_device, path_name, shard_count

T = TypeVar("T")

DONE, FAILED = 0, 1
WAIT_LIMIT = 0.05  # of a run's time; waiting longer for data is said at the end


class LateMetrics:
    """Metrics of the step before: reading them never waits for the step that was just dispatched."""

    def __init__(self) -> None:
        self._waiting: tuple[int, dict[str, jax.Array]] | None = None

    def push(self, step: int, metrics: dict[str, jax.Array]) -> tuple[int, dict[str, float]] | None:
        """Hand in a dispatched step's metrics; get the previous step's values, if one is waiting."""
        for value in metrics.values():
            value.copy_to_host_async()
        ready = self.flush()
        self._waiting = (step, metrics)
        return ready

    def flush(self) -> tuple[int, dict[str, float]] | None:
        """The waiting step's values, after waiting for it."""
        if self._waiting is None:
            return None
        (step, metrics), self._waiting = self._waiting, None
        return step, {name: float(value) for name, value in jax.device_get(metrics).items()}


class Clock:
    """Times between the moments at which steps were seen to be finished, evaluations left out."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens, self._mark, self._waited = tokens_per_step, time.perf_counter(), 0.0

    def restart(self) -> None:
        """Do not count the time since the last step."""
        self._mark, self._waited = time.perf_counter(), 0.0

    def awaited(self, batches: Iterable[T]) -> Iterator[T]:
        """The same, with the time that each was waited for counted."""
        rest = iter(batches)
        while True:
            before = time.perf_counter()
            try:
                batch = next(rest)
            except StopIteration:
                return
            self._waited += time.perf_counter() - before
            yield batch

    def read(self) -> dict[str, float]:
        """Of the step that has just been seen: tokens_per_s; data_wait, the fraction of its time that the loop waited
        for the batch of the step after it."""
        now = time.perf_counter()
        seconds, waited = now - self._mark, self._waited
        self._mark, self._waited = now, 0.0
        return {"tokens_per_s": self._tokens / seconds, "data_wait": waited / seconds}


class Recorder:
    """Takes finished steps to console and metrics.jsonl."""

    def __init__(self, run: Run, spikes: Spikes) -> None:
        self._run, self._spikes = run, spikes
        self._late, self._unwritten = LateMetrics(), False
        self._rates = learning_rates(run.config.optimizer, run.config.train.steps)
        self._clock = Clock(run.config.data.global_batch * run.config.data.seq_len)
        self.awaited = self._clock.awaited

    def dispatched(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """A step was handed to the device: record the one before it."""
        self._record(self._late.push(step, metrics))

    def catch_up(self, evaluate: Callable[[], dict[str, float]] | None = None) -> dict[str, float]:
        """Wait for the last step and record it, with the evaluation that follows it, which no step's time includes.
        Returns that evaluation, {} without one."""
        evaluation = self._record(self._late.flush(), evaluate)
        self._clock.restart()
        return evaluation

    def _record(
        self, finished: tuple[int, dict[str, float]] | None, evaluate: Callable[[], dict[str, float]] | None = None
    ) -> dict[str, float]:
        if finished is None:
            return {}
        step, values = finished
        loss, norm = values.pop("loss"), values["grad_norm"]
        skipped, in_a_row = int(values.pop("skipped", 0)), int(values.pop("skipped_in_a_row", 0))
        rate = self._rates[step - 1 - skipped + (in_a_row > 0)]  # the optimizer has not counted skipped steps
        metrics = {"loss": loss, **values, "lr": float(rate), **self._clock.read()}
        metrics |= {"skipped": skipped} if in_a_row else {}
        self._run.console.step(step, metrics)
        evaluation = evaluate() if evaluate is not None and math.isfinite(loss) else {}
        if evaluation:
            self._run.console.evaluation(step, evaluation)
        self._write(step, metrics | evaluation)
        if is_bad(loss, norm) or in_a_row:
            self._judge(step, loss, norm, in_a_row, values.get("loss_scale"))
        else:
            self._spikes.check(step, loss)
        return evaluation

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """To metrics.jsonl. A full disk is said once, and does not end the run before its end."""
        if self._run.metrics is None:
            return
        try:
            self._run.metrics.write(step, metrics)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self._run.console.line(f"warning: metrics.jsonl, step {step}: {error.strerror}; kept for the next one")
            self._unwritten = True

    def _judge(self, step: int, loss: float, norm: float, in_a_row: int, scale: float | None) -> None:
        """Say that a step was skipped, or raise `NonFinite`."""
        limit = self._run.max_skips
        if 0 < in_a_row <= limit:
            self._run.console.line(skip_line(step, loss, norm, scale))
            return
        name, value = ("grad_norm", norm) if math.isfinite(loss) else ("loss", loss)
        row = f", after {limit} more in a row (precision.max_consecutive_skips)" if limit else ""
        other = "" if self._run.config.precision.policy == "fp32" else ", or precision=fp32"
        text = f"{name} of step {step} is {value}{row}; try a lower optimizer.lr{other}"
        raise NonFinite(step, text, guarded=in_a_row > 0)


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every `every` steps (0 = never) and after the last one is due after `step`."""
    return every > 0 and (step % every == 0 or step == last)


def loop(run: Run) -> tuple[int, bool]:
    """Train to the last step or until asked to stop. Returns the steps taken and whether all were."""
    config = run.config
    loader = make_loader(
        run.source, seq_len=config.data.seq_len, global_batch=config.data.global_batch, seed=config.train.seed,
        sharding=run.sharding,
    )  # fmt: skip
    spikes = Spikes(config.train.loss_spike)
    while True:
        try:
            return steps(run, loader, spikes)
        except NonFinite as error:
            failed = error.with_traceback(None)  # its frames would keep the old state in memory
        run.console.line(f"step {failed.step}: {failed}")
        rolling = config.train.on_nonfinite == "rollback"
        if failed.guarded and not rolling:  # the state is that before the step, and counts the step's batch
            begin_save(run, failed.step)
        finding = look_into(run, failed, loader)
        why = roll_back(run, failed) if rolling else "stopped"
        write_down(run, failed, finding, action=why or "rolled back")
        if why:
            raise failed if not rolling else NonFinite(failed.step, f"{failed}; {why}", guarded=failed.guarded)


def save(run: Run, step: int, loss: float | None = None) -> None:
    """Save the state. Raises `NonFinite` where it is not finite."""
    try:
        begin_save(run, step, loss)
        return
    except FloatingPointError as error:
        text = str(error)
    raise NonFinite(step, text, guarded=False)


def steps(run: Run, loader: Loader | MixedLoader, spikes: Spikes) -> tuple[int, bool]:
    """`loop`, to the first step that the run cannot take: raises `NonFinite`."""
    config, last = run.config, run.config.train.steps
    evaluate = Evaluator(run) if config.train.eval_every else None
    recorder = Recorder(run, spikes)
    step, stopped = run.first_step, False
    batches = prefetch(lambda i: loader.batch(i + run.passed), step, last, config.data.prefetch)
    with StopSignal() as stop, closing(batches):
        for batch in recorder.awaited(batches):
            loaded = run.cache.count
            with jax.transfer_guard("disallow"):  # an implicit transfer would wait for the device
                run.state, metrics = run.step(run.state, batch)
                step += 1
                recorder.dispatched(step, metrics)
            if step == run.first_step + 1 and run.cache.count > loaded:
                run.console.line("the program of a step came from the compilation cache")
            stopped = stop.requested(step) and step < last
            evaluating = evaluate is not None and due(step, config.train.eval_every, last)
            saving = due(step, config.checkpoint.every, last) or step == last or stopped
            evaluation = {}
            if evaluating or saving:
                # A checkpoint must not hold what came after a non-finite loss: look at the loss first.
                after = functools.partial(evaluate, run.state.params) if evaluate and evaluating else None
                evaluation = recorder.catch_up(after)
            if saving:
                save(run, step, evaluation.get("eval/loss"))
            if stopped:
                break
    return step, not stopped


def sample_text(run: Run) -> str:
    """Text that the model writes after the prompt, one sample a batch shard. Needs a source of bytes."""
    config, rows, length = run.config, batch_shards(run.mesh), run.config.data.seq_len
    prompt = np.frombuffer(config.train.sample_prompt.encode()[: length - 1] or b"\n", np.uint8)
    stop = min(length, len(prompt) + config.train.sample_tokens)
    tokens = np.zeros((rows, length), np.int32)
    tokens[:, : len(prompt)] = prompt
    sampler = make_sampler(*forward_parts(run))
    global_tokens = jax.make_array_from_callback(tokens.shape, run.sharding, lambda index: tokens[index])
    drawn = sampler(run.state.params, global_tokens, len(prompt), stop, jax.random.key(config.train.seed))
    whole = multihost_utils.process_allgather(drawn, tiled=True)
    return "\n\n".join(bytes(row[:stop].astype(np.uint8)).decode("utf-8", "replace") for row in np.asarray(whole))


def layout_rows(run: Run) -> list[LayoutRow]:
    """The sharding table of the parameters."""
    return [
        LayoutRow(
            path_name(path), leaf.shape, str(leaf.dtype), str(leaf.sharding.spec),
            shard_count(leaf.sharding.spec, run.mesh), bytes_per_device(leaf, leaf.sharding.spec, run.mesh),
            math.prod(leaf.shape) * leaf.dtype.itemsize,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(run.target.params)
    ]  # fmt: skip


def report(run: Run, samples: str) -> None:
    """Write report.html from the run directory."""
    config = run.config
    write_report(
        run.folder / "report.html",
        title=run.folder.name,
        config_yaml=to_yaml(config),
        environment=run_environment(run.mesh),
        metrics=read_metrics(run.folder / "metrics.jsonl"),
        layout=layout_rows(run),
        mesh_axes=sizes_of(run.mesh),
        devices=[device.device_kind for device in run.mesh.devices.flat],
        baselines=run.baselines,
        samples=samples,
        data_info={**run.source.info, "tokens_per_step": config.data.global_batch * config.data.seq_len},
    )


def data_wait(records: Sequence[Mapping[str, Any]]) -> float:
    """The fraction of a run's time that it waited for data, by the records of metrics.jsonl but the first, in whose
    step the program is compiled."""
    timed = [record for record in records[1:] if "data_wait" in record]
    seconds = [1 / record["tokens_per_s"] for record in timed]  # times the tokens of a step
    waited = sum(record["data_wait"] * each for record, each in zip(timed, seconds, strict=True))
    return waited / sum(seconds) if timed else 0.0


def finish(run: Run, samples: str) -> None:
    """After the last step: what the run directory and the reader get. Process 0 only."""
    if samples:
        (run.folder / "samples.txt").write_text(samples + "\n", encoding="utf-8")
        run.console.line("sample\n" + "\n".join("  | " + line for line in samples.split("\n\n")[0].splitlines()[:12]))
    if run.config.observe.report:
        report(run, samples)
    records = read_metrics(run.folder / "metrics.jsonl")
    evaluations = [record for record in records if "eval/bits_per_byte" in record]
    if evaluations:
        bits = evaluations[-1]["eval/bits_per_byte"]
        marks = [
            f"{'below' if bits < mark else 'NOT below'} the {name} model's {mark:.3f}"
            for name, mark in run.baselines.items()
        ]
        run.console.line(", ".join([f"held-out text: {bits:.3f} bits per byte", *marks]))
    waited = data_wait(records)
    if waited > WAIT_LIMIT:
        run.console.line(f"waited for data {waited:.0%} of the time: docs/data.md says what helps")
    run.console.line(f"run directory: {run.folder}")


def run_directory(given: str | None, config_path: str) -> Path:
    """The folder of a run: the one given, or a new one under runs/ called after the configuration and the time."""
    name = f"{Path(config_path).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(given) if given is not None else Path("runs") / name
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--run-dir: {given} is a file; give a folder, new or of a run to resume")
    return folder


def agree_on(folder: Path) -> Path:
    """Process 0's folder on every process: they may have been started in different seconds."""
    return Path(from_first(str(folder)))


def train(config: Config, folder: Path) -> int:
    """Train as `config` says into `folder`, resuming what is there. Returns the exit status: 0 done, 75 stopped and
    resumable, 1 failed. Raises `UserError` for what the user can mend."""
    config = start(config)
    with fail_alone():
        return _train(config, folder)


def _train(config: Config, folder: Path) -> int:
    folder = agree_on(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir: {str(folder)!r} cannot be made: {error.strerror}; give another folder") from error
    try:
        return _run(config, folder)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if jax.process_count() > 1:  # the others may be waiting: say what can be said, and end (`fail_alone`)
            advise(config, folder, str(error), compiling=False)
            raise
        reason = str(error)
    advise(config, folder, reason, compiling=True)  # not before the traceback is gone: it holds the state
    return FAILED


def _close_metrics(run: Run) -> None:
    try:
        if run.metrics is not None:
            run.metrics.close()
    except OSError as error:
        run.console.line(f"warning: metrics.jsonl: {error.strerror}; the last lines are not in it")


def _run(config: Config, folder: Path) -> int:
    with ExitStack() as stack:
        run = build(config, folder, stack)
        stack.callback(_close_metrics, run)
        run.console.header(describe(run))
        try:
            step, complete = loop(run)
        except NonFinite as error:
            settle(run)
            run.console.line(f"failed: {error}")
            return FAILED
        samples = ""
        if complete and config.train.sample_tokens and run.source.info["unit"] == "bytes":
            samples = sample_text(run)
        if not all_saved(run):
            return FAILED
        if jax.process_index() == 0:
            if not complete:
                run.console.line(f"stopped after step {step}; the same command with --run-dir {folder} goes on")
            finish(run, samples)
    return DONE if complete else STOPPED
