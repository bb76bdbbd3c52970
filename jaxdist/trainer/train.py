"""Training: the loop of a run, behind `scripts/train.py`.

The story of this folder: `train` (here) checks the run directory, `run.build` makes the run, and `loop` steps through
it. `recorder` writes metrics, `evaluation` evaluates and samples, `saving` saves, `nonfinite` handles bad steps with
the diagnoses in `failures/`. `header` and `summary` are the first and the last lines on the console. `fit` makes a run
of a user's objects in Python, and its `Work` for the same loop.

The loop never waits for the device: a thread makes batches ahead, and metrics are read one step late.
"""

import faulthandler
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import jax

from jaxdist.checkpoint import Checkpoints
from jaxdist.config.schema import Config
from jaxdist.data import prefetch
from jaxdist.errors import RunStopped, UserError
from jaxdist.files.launcher_notes import RUN_DIR
from jaxdist.files.user_path import user_path
from jaxdist.observe.environment import versions
from jaxdist.optim.make import learning_rates
from jaxdist.plan.auto_remat import start_fitting
from jaxdist.processes import anywhere, done_by_first, from_first
from jaxdist.runtime.exit_status import DONE, FAILED, STOPPED
from jaxdist.runtime.join.roll_call import MissingPeers
from jaxdist.runtime.output import lasting_output
from jaxdist.runtime.run_claim import RunClaim
from jaxdist.runtime.run_folder import leave_stop_note, new_run_directory, refuse_strangers
from jaxdist.runtime.start import fail_alone
from jaxdist.runtime.watch.replica_check import ReplicaCheck, ReplicasDiffer
from jaxdist.runtime.watch.stop import StopSignal, TimeLimit
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.specs import PyTree
from jaxdist.trainer.batches.load import loader_of, work_of_a_step
from jaxdist.trainer.batches.sample_hashes import log_samples
from jaxdist.trainer.evaluation import Ending, Evaluator, evaluated, text_sampler
from jaxdist.trainer.failures.out_of_memory import advise, is_out_of_memory
from jaxdist.trainer.failures.same_program import facts_of_start
from jaxdist.trainer.header import describe
from jaxdist.trainer.measures.clock import Clock
from jaxdist.trainer.measures.profile import Profile
from jaxdist.trainer.measures.step_figures import StepFigures
from jaxdist.trainer.nonfinite import NonFinite, Spikes, blame_data, look_into, roll_back
from jaxdist.trainer.recorder import Measured, Recorder, last_time, session_start
from jaxdist.trainer.run import RunPlan, TrainingRun, Work, build
from jaxdist.trainer.saving import all_saved, begin_save, settle
from jaxdist.trainer.summary import write_summary

MOVED = "the run directory was moved"  # a reason to stop


def due(step: int, every: int, last: int) -> bool:
    """Whether an action is due after `step` that happens every `every` steps (0 = never) and after the last one."""
    return every > 0 and (step % every == 0 or step == last)


def work_of(run: TrainingRun) -> Work:
    """The work of a run by its configuration."""
    plan, config = run.plan, run.plan.config
    loader = loader_of(config, plan.source, plan.mesh)
    if plan.parts.teaching is not None:
        loader = plan.parts.teaching.batches(loader)
    evaluator = Evaluator(plan, run.watch) if config.train.eval_every else None
    return Work(
        batch=loader.batch,
        per_step=work_of_a_step(config, plan.source),
        rates=learning_rates(config.optimizer, config.train.steps),
        evaluate=evaluator,
    )


def loop(run: TrainingRun, work: Work, stop: StopSignal) -> tuple[int, bool]:
    """Train to the last step, or until asked to stop. Returns the last step, and whether the run is complete."""
    started = session_start(stop.started)
    with closing(StepFigures(run.plan, run.outputs.console.line)) as figures:
        return _loop(run, work, stop, Measured(Clock(*work.per_step, started=started), figures))


def _loop(run: TrainingRun, work: Work, stop: StopSignal, measured: Measured) -> tuple[int, bool]:
    config, watch = run.plan.config, run.watch
    spikes = Spikes(config.train.loss_spike)
    while True:
        try:
            return steps(run, work, spikes, stop, measured)
        except NonFinite as error:
            failed = error.with_traceback(None)  # its frames would keep the old state in memory
        failed = blame_data(run, failed, work)
        run.outputs.console.line(f"step {failed.step}: {failed}")
        watch.crumbs.enter("look into it")
        rolling = config.train.on_nonfinite == "rollback"
        if failed.guarded and not rolling:  # the state is that before the step, and counts the step's batch
            begin_save(run, failed.step)
        finding = look_into(run, failed, work)
        why = roll_back(run, failed, work) if rolling else "stopped"
        record = {"step": failed.step, "what": str(failed), "action": why or "rolled back"}
        found = None if finding is None else finding._asdict()
        run.outputs.note(record | {"batches_passed": run.progress.passed, "found": found})
        if why:
            raise failed if not rolling else NonFinite(failed.step, f"{failed}; {why}", guarded=failed.guarded)
        measured.clock.rewind(last_time(run.outputs))
        work.restored(run.progress.meta)


def save(run: TrainingRun, step: int, loss: float | None = None) -> None:
    """Save the state. Raises `NonFinite` where it is not finite."""
    if run.outputs.checkpoints.under_way is not None:
        run.watch.crumbs.enter("settle")
        settle(run.outputs)
    run.watch.crumbs.enter("save")
    try:
        begin_save(run, step, loss)
        return
    except FloatingPointError as error:
        text = str(error)
    raise NonFinite(step, text, guarded=False)  # not within `except`: the first error's frames hold the state


def steps(run: TrainingRun, work: Work, spikes: Spikes, stop: StopSignal, measured: Measured) -> tuple[int, bool]:
    """`loop`, up to the first step that the run cannot take: raises `NonFinite`."""
    plan, progress, crumbs = run.plan, run.progress, run.watch.crumbs
    config, last = plan.config, plan.config.train.steps
    recorder = Recorder(plan, work, run.outputs, run.watch, spikes, measured)
    step, saved, stopped, ended = progress.first_step, 0, False, False
    check = ReplicaCheck(plan.parts.target, plan.mesh) if config.train.check_replicas_every else None
    batches = prefetch(lambda i: work.batch(i + progress.passed), step, last, config.data.prefetch)

    def lost() -> None:
        recorder.catch_up()
        if progress.first_step < step != saved:
            save(run, step)
            settle(run.outputs)

    with closing(batches), crumbs.failing(), closing(Profile(run, measured.clock)) as profile:
        guard = "allow"  # the first call traces the step, which may compute constants
        for batch in crumbs.steps(recorder.awaited(or_lost(batches, lost)), step):
            loaded = run.cache.count
            profile.before(step + 1)
            with jax.transfer_guard(guard):  # an implicit transfer would wait for the device
                crumbs.at_step("dispatch")
                with recorder.calling(step + 1):
                    progress.state, metrics = plan.parts.step(progress.state, batch)
                step, guard = step + 1, "disallow"
                measured.figures.begin(batch)
                crumbs.at_step("wait")
                recorder.dispatched(step, metrics)
            if config.observe.samples:
                crumbs.at_step("wait")
                log_samples(run.outputs.samples, step, batch)
            crumbs.at_step("agree")
            if step == progress.first_step + 1 and run.cache.count > loaded:
                run.outputs.console.line("the program of a step came from the compilation cache")
            if run.outputs.claim is not None and run.outputs.claim.is_moved():
                stop.ask(MOVED)
            stopped = stop.requested(step) and step < last
            crumbs.enter("host")
            evaluating = work.evaluate is not None and due(step, config.train.eval_every, last)
            saving = due(step, config.checkpoint.every, last) or step == last or stopped
            evaluation = {}
            if check and (saving or due(step, config.train.check_replicas_every, last)):
                crumbs.enter("check")
                check(step, progress.state)
            if evaluating or saving:
                crumbs.at_step("wait")
                # A checkpoint must not hold what came after a non-finite loss: look at the loss first.
                after = functools.partial(work.evaluate, progress.state) if work.evaluate and evaluating else None
                evaluation = recorder.catch_up(after)
                ended = bool(evaluation) and work.ends(evaluation)
            if saving or ended:
                with measured.clock.spending("save"):
                    save(run, step, evaluation.get("eval/loss"))
                saved = step
            profile.after(step)
            if stopped or ended:
                break
    return step, ended or not stopped


def or_lost(batches: Iterator[PyTree], lost: Callable[[], None]) -> Iterator[PyTree]:
    """The batches. Where the next cannot be had, `lost` is called first, which saves what was trained. Not in a job of
    several processes: the others may have their batch, and would not take part in a save."""
    while True:
        try:
            batch = next(batches, None)
        except Exception:
            if jax.process_count() == 1:
                lost()
            raise
        if batch is None:
            return
        yield batch


def run_directory(given: str | None, config_path: str, *, make: bool = False) -> Path:
    """The folder of a run: the given one, else the launcher's, else a new one under runs/ named after the configuration
    and the time. make: a new one is made."""
    given = given if given is not None else os.environ.get(RUN_DIR) or None
    folder = user_path(given, key="--run-dir") if given is not None else new_run_directory(config_path, make=make)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--run-dir: {given} is a file; give a folder, new or of a run to resume")
    return folder


def train(config: Config, folder: Path) -> int:
    """Train into `folder`, or resume the run that is there.

    Returns the exit status: 0 done, 75 stopped and resumable, 1 failed. Raises `UserError` for what the user can mend.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a fault, such as SIGBUS of a mapped file that became shorter, shows where it was
    watch = Watch(config.train.watchdog_s)
    with StopSignal() as stop, lasting_output(stop.reader_gone):
        try:
            config = start_fitting(config, lambda config: watch.opened(facts_of_start(config, versions())))
        except MissingPeers as error:
            print(f"error: {error}", file=sys.stderr)
            return STOPPED
        stop.join()
        try:
            with fail_alone(), watch.reporting():
                status = _in_folder(config, folder, stop, watch)
                watch.close()
                return status
        except RunStopped as error:
            print(f"error: {error}", file=sys.stderr)
            return STOPPED


def _in_folder(config: Config, folder: Path, stop: StopSignal, watch: Watch) -> int:
    folder = Path(from_first(str(folder)))  # a new one is named after the second in which its process started
    with ExitStack() as stack:
        claimed = claim(folder, stack, watch, stop)
        return _in_claimed(config, folder, claimed, stop, watch)


def claim(folder: Path, stack: ExitStack, watch: Watch, stop: StopSignal) -> RunClaim | None:
    """The claim on a run directory, which lasts as long as `stack`. It is that of process 0, and None on the others."""
    claimed: list[RunClaim] = []

    def first() -> None:
        claimed.append(stack.enter_context(RunClaim(folder)))
        refuse_strangers(folder)

    done_by_first(first)
    watch.folder, stop.folder = folder, lambda: watch.folder  # which may be moved
    return next(iter(claimed), None)


def _in_claimed(config: Config, folder: Path, claim: RunClaim | None, stop: StopSignal, watch: Watch) -> int:
    try:
        return _build_and_loop(config, folder, claim, stop, watch)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if jax.process_count() > 1:  # the others may be waiting: say what can be said, and end (`fail_alone`)
            advise(config, folder, str(error), compiling=False)
            raise
        reason = str(error)
    advise(config, folder, reason, compiling=True)  # not before the traceback is gone: it holds the state
    return FAILED


def time_limit(plan: RunPlan, checkpoints: Checkpoints, started: float) -> TimeLimit:
    """The limit by `train.max_hours`. A save is taken to last as long as the longest one so far; before the first, as
    its bytes do at 100 MB/s."""
    hours, leaves = plan.config.train.max_hours, jax.tree.leaves(plan.parts.target)
    guess = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / 1e8
    return TimeLimit(hours and hours * 3600, started, lambda: checkpoints.longest_save or guess)


def ending_of(run: TrainingRun) -> Ending:
    """How `train.early_stop` ends the run. From here on its counts are saved beside the state."""
    asked, record = run.plan.config.train.early_stop, run.record
    ending = Ending(asked.patience, asked.min_delta)
    ending.restore(run.progress.meta)
    if asked.patience is not None:
        run.record = lambda step: record(step) | ending.saved
    return ending


def _build_and_loop(config: Config, folder: Path, claim: RunClaim | None, stop: StopSignal, watch: Watch) -> int:
    with ExitStack() as stack, watch.crumbs.failing():
        run = build(config, folder, stack, watch, text_sampler)
        run.outputs.claim = claim
        outputs, console = run.outputs, run.outputs.console
        stack.callback(outputs.close_metrics)
        console.header(describe(run))
        stop.limit = time_limit(run.plan, outputs.checkpoints, stop.started)
        ending = ending_of(run)
        try:
            step, complete = run.progress.first_step, True
            if not ending.is_over:
                step, complete = loop(run, replace(work_of(run), ends=ending, restored=ending.restore), stop)
        except NonFinite as error:
            settle(outputs)
            outputs.failed(str(error))
            return FAILED
        except ReplicasDiffer as error:  # it was not saved: the newest checkpoint is good
            settle(outputs)
            console.line(f"stopped: {error}; the same command with --run-dir {outputs.folder} goes on before it")
            outputs.note({"step": error.step, "what": str(error), "action": "stopped"})
            return STOPPED
        except RunStopped as error:  # perhaps on this process alone: it may not wait for a save with the others
            outputs.note({"step": watch.crumbs.last.step, "what": str(error), "action": "stopped"})
            raise
        watch.crumbs.enter("finish")
        samples = run.sample(evaluated(run.progress.state)[0]) if complete and run.sample else ""
        watch.crumbs.enter("settle")
        if not all_saved(outputs):
            return FAILED
        watch.crumbs.enter("finish")
        if jax.process_index() == 0:
            if not complete:
                if stop.why == "train.max_hours":
                    console.line(f"train.max_hours: {config.train.max_hours:g} hours are nearly over")
                console.line(f"stopped after step {step}; the same command with --run-dir {outputs.folder} goes on")
            elif ending.is_over:
                console.line(ending.why(step, "train.early_stop"))
            write_summary(run, samples)
            outputs.sinks.close()  # which may wait for a network, and the others for this process
        anywhere(False)  # all stay until process 0 is done, with watch and signal handlers
    if not complete:
        leave_stop_note(os.environ)
    return DONE if complete else STOPPED
