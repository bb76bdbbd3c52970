"""The training run behind `scripts/train.py`: loop, and leave a run directory that tells the whole story.

The loop never waits for the device: batches are made ahead by a thread, metrics are read one step late.
"""

import functools
import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import jax

from jaxdist.config.schema import Config
from jaxdist.data import Loader, MixedLoader, SampleLoader, make_loader, prefetch
from jaxdist.errors import UserError
from jaxdist.observe.environment import versions
from jaxdist.processes import anywhere, from_first
from jaxdist.runtime.exit_status import STOPPED
from jaxdist.runtime.join.roll_call import MissingPeers
from jaxdist.runtime.run_folder import RUN_DIR, leave_stop_note, new_run_directory
from jaxdist.runtime.start import fail_alone, start
from jaxdist.runtime.watch.replica_check import ReplicaCheck, ReplicasDiffer
from jaxdist.runtime.watch.stop import StopSignal, TimeLimit
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.trainer.evaluation import Evaluator
from jaxdist.trainer.failures.nonfinite import NonFinite, Spikes, look_into, roll_back, write_down
from jaxdist.trainer.failures.out_of_memory import advise, is_out_of_memory
from jaxdist.trainer.failures.same_program import facts_of_start
from jaxdist.trainer.header import describe
from jaxdist.trainer.recorder import Recorder
from jaxdist.trainer.run import Run, build, note
from jaxdist.trainer.sample_hashes import hashes_of
from jaxdist.trainer.saving import all_saved, begin_save, settle
from jaxdist.trainer.summary import finish, sample_text

DONE, FAILED = 0, 1


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every `every` steps (0 = never) and after the last one is due after `step`."""
    return every > 0 and (step % every == 0 or step == last)


def loop(run: Run, stop: StopSignal) -> tuple[int, bool]:
    """Train to the last step or until asked to stop. Returns the steps taken and whether all were."""
    config = run.config
    loader = make_loader(
        run.source,
        seq_len=config.data.seq_len,
        global_batch=config.data.global_batch,
        seed=config.train.seed,
        sharding=run.sharding,
    )
    spikes = Spikes(config.train.loss_spike)
    while True:
        try:
            return steps(run, loader, spikes, stop)
        except NonFinite as error:
            failed = error.with_traceback(None)  # its frames would keep the old state in memory
        run.console.line(f"step {failed.step}: {failed}")
        run.watch.crumbs.enter("look into it")
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
    if run.checkpoints.under_way:
        run.watch.crumbs.enter("settle")
        settle(run)
    run.watch.crumbs.enter("save")
    try:
        begin_save(run, step, loss)
        return
    except FloatingPointError as error:
        text = str(error)
    raise NonFinite(step, text, guarded=False)


def steps(run: Run, loader: Loader | MixedLoader | SampleLoader, spikes: Spikes, stop: StopSignal) -> tuple[int, bool]:
    """`loop`, to the first step that the run cannot take: raises `NonFinite`."""
    config, last = run.config, run.config.train.steps
    evaluate = Evaluator(run) if config.train.eval_every else None
    recorder = Recorder(run, spikes)
    step, stopped = run.first_step, False
    check = ReplicaCheck(run.target, run.mesh) if config.train.check_replicas_every else None
    crumbs = run.watch.crumbs
    batches = prefetch(lambda i: loader.batch(i + run.passed), step, last, config.data.prefetch)
    with closing(batches), crumbs.failing():
        for batch in crumbs.steps(recorder.awaited(batches), step):
            loaded = run.cache.count
            with jax.transfer_guard("disallow"):  # an implicit transfer would wait for the device
                crumbs.at_step("dispatch")
                run.state, metrics = run.step(run.state, batch)
                step += 1
                crumbs.at_step("wait")
                recorder.dispatched(step, metrics)
            if run.config.observe.samples:
                crumbs.at_step("wait")
                log_samples(run, step, batch)
            crumbs.at_step("agree")
            if step == run.first_step + 1 and run.cache.count > loaded:
                run.console.line("the program of a step came from the compilation cache")
            stopped = stop.requested(step) and step < last
            crumbs.enter("host")
            evaluating = evaluate is not None and due(step, config.train.eval_every, last)
            saving = due(step, config.checkpoint.every, last) or step == last or stopped
            evaluation = {}
            if check and (saving or due(step, config.train.check_replicas_every, last)):
                crumbs.enter("check")
                check(step, run.state)
            if evaluating or saving:
                crumbs.at_step("wait")
                # A checkpoint must not hold what came after a non-finite loss: look at the loss first.
                after = functools.partial(evaluate, run.state.params) if evaluate and evaluating else None
                evaluation = recorder.catch_up(after)
            if saving:
                save(run, step, evaluation.get("eval/loss"))
            if stopped:
                break
    return step, not stopped


def log_samples(run: Run, step: int, batch: Mapping[str, jax.Array]) -> None:
    """`observe.samples`."""
    found = hashes_of(batch)
    if run.samples is not None:
        run.samples.write_list(step, "samples", found)


def run_directory(given: str | None, config_path: str) -> Path:
    """The folder of a run: the one given, or that of the launcher, or a new one under runs/ called after the
    configuration and the time."""
    given = given if given is not None else os.environ.get(RUN_DIR) or None
    folder = Path(given) if given is not None else new_run_directory(config_path)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--run-dir: {given} is a file; give a folder, new or of a run to resume")
    return folder


def refuse_links(folder: Path) -> None:
    """Raise `UserError` for a link where this run writes: a run directory from elsewhere could lead to any file."""
    for place in (folder, folder / "checkpoints"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_symlink():
                raise UserError(
                    f"--run-dir: {str(path)!r} is a link to {str(path.readlink())!r}, and a run writes"
                    " there; remove it; to use another disk, give a --run-dir on it"
                )


def agree_on(folder: Path) -> Path:
    """Process 0's folder on every process: they may have been started in different seconds."""
    return Path(from_first(str(folder)))


def train(config: Config, folder: Path) -> int:
    """Train as `config` says into `folder`, resuming what is there. Returns the exit status: 0 done, 75 stopped and
    resumable, 1 failed. Raises `UserError` for what the user can mend."""
    watch = Watch(config.train.watchdog_s)
    with StopSignal() as stop:
        try:
            config = start(config, lambda config: watch.opened(facts_of_start(config, versions())))
        except MissingPeers as error:
            print(f"error: {error}", file=sys.stderr)
            return STOPPED
        stop.join()
        with fail_alone(), watch.reporting():
            status = _train(config, folder, stop, watch)
            watch.close()
            return status


def _train(config: Config, folder: Path, stop: StopSignal, watch: Watch) -> int:
    folder = agree_on(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir: {str(folder)!r} cannot be made: {error.strerror}; give another folder") from error
    refuse_links(folder)
    try:
        watch.folder = folder
        return _run(config, folder, stop, watch)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if jax.process_count() > 1:  # the others may be waiting: say what can be said, and end (`fail_alone`)
            advise(config, folder, str(error), compiling=False)
            raise
        reason = str(error)
    advise(config, folder, reason, compiling=True)  # not before the traceback is gone: it holds the state
    return FAILED


def time_limit(run: Run, started: float) -> TimeLimit:
    """`train.max_hours`. A save takes as long as the longest one, and before there was one as its bytes at 100 MB/s."""
    hours, leaves = run.config.train.max_hours, jax.tree.leaves(run.target)
    guess = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / 1e8
    return TimeLimit(hours and hours * 3600, started, lambda: run.checkpoints.longest_save or guess)


def _close_metrics(run: Run) -> None:
    try:
        if run.metrics is not None:
            run.metrics.close()
    except OSError as error:
        run.console.line(f"warning: metrics.jsonl: {error.strerror}; the last lines are not in it")


def _run(config: Config, folder: Path, stop: StopSignal, watch: Watch) -> int:
    with ExitStack() as stack, watch.crumbs.failing():
        run = build(config, folder, stack, watch)
        stack.callback(_close_metrics, run)
        run.console.header(describe(run))
        stop.limit = time_limit(run, stop.started)
        try:
            step, complete = loop(run, stop)
        except NonFinite as error:
            settle(run)
            run.console.line(f"failed: {error}")
            return FAILED
        except ReplicasDiffer as error:  # it was not saved: the newest checkpoint is good
            settle(run)
            run.console.line(f"stopped: {error}; the same command with --run-dir {folder} goes on before it")
            note(folder, run.console, {"step": error.step, "what": str(error), "action": "stopped"})
            return STOPPED
        watch.crumbs.enter("finish")
        samples = ""
        if complete and config.train.sample_tokens and run.source.info["unit"] == "bytes":
            samples = sample_text(run)
        if not all_saved(run):
            return FAILED
        if jax.process_index() == 0:
            if not complete:
                if stop.why == "train.max_hours":
                    run.console.line(f"train.max_hours: {config.train.max_hours:g} hours are nearly over")
                run.console.line(f"stopped after step {step}; the same command with --run-dir {folder} goes on")
            finish(run, samples)
        anywhere(False)  # all stay until process 0 is done, with watch and signal handlers
    if not complete:
        leave_stop_note(os.environ)
    return DONE if complete else STOPPED
