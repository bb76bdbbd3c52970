"""The work of the command `eval`, once its arguments are read."""

import json
import math
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxdist.build import assemble, mesh_of_config
from jaxdist.checkpoint.reader import Stored, newest_intact_step, open_steps, step_folders
from jaxdist.config.schema import Config
from jaxdist.config.sections.distill import DistillConfig
from jaxdist.config.sections.local import LocalConfig
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path
from jaxdist.plan.traced.sharding import aligned
from jaxdist.pretrained.saved import Saved
from jaxdist.processes import done_by_first
from jaxdist.runtime.start import fail_alone, start
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.state import TrainState
from jaxdist.trainer.batches.load import load_data
from jaxdist.trainer.evaluation import Evaluator
from jaxdist.trainer.resume import check_identity, identity
from jaxdist.trainer.run import RunPlan


def run_eval(arguments: Namespace, config: Config) -> int:
    """Print the metrics of a checkpoint, and write them where `--json` says. All processes of a job must call it."""
    run_dir = user_path(arguments.run_dir, key="RUN_DIR")
    step_folders(run_dir)  # a run without checkpoints is told before the work
    config = start(config)
    with fail_alone():
        stored = Stored(chosen_step(run_dir, arguments.step))
        averaged = averages_of(stored, raw=arguments.raw)
        plan = forward_plan(config, everything=arguments.all)
        evaluator = Evaluator(plan, Watch())
        state = read_state(plan, stored, run_dir, ema=averaged)
        found = evaluator(state)
        if jax.process_index() == 0:
            batches, size = evaluator.batches, config.data.global_batch
            path = config.data.val_path or plan.source.info["path"]
            what = f"step {stored.step} of {arguments.run_dir}{', the moving average' if averaged else ''}"
            print(f"{what}: {batches} held-out batches of {size}, of {path}")
            print("\n".join(aligned([(name, f"{value:.6f}") for name, value in found.items()], right=(1,))))
            if arguments.json is not None:
                write_json(arguments, stored.step, averaged=averaged, batches=batches, metrics=found)
    return 0


def forward_plan(config: Config, *, everything: bool) -> RunPlan:
    """The plan of an evaluation: that of the run, without a teacher, and of one replica. everything: whether all
    held-out batches count."""
    alone = replace(config, distill=DistillConfig(), parallel=replace(config.parallel, local=LocalConfig()))
    if everything:
        alone = replace(alone, train=replace(alone.train, eval_batches=sys.maxsize))
    mesh = mesh_of_config(config)
    return RunPlan(alone, mesh, load_data(alone), assemble(alone, mesh))


def chosen_step(run_dir: Path, step: int | str | None) -> Path:
    """The folder of the checkpoint to evaluate: `step`, or the newest that is intact."""

    def find() -> str:
        if step is not None:
            return str(open_steps(run_dir, step=step)[0].folder)
        return str(newest_intact_step(run_dir))

    return Path(done_by_first(find))


def averages_of(stored: Stored, *, raw: bool) -> bool:
    """Whether the moving average is evaluated. Raises `UserError` for raw parameters of a run that has no others."""
    kept = bool(stored.averages())
    if raw and not kept:
        raise UserError(
            "--raw: the run keeps no moving average (train.ema), its parameters are what counts; leave it out"
        )
    return kept and not raw


def read_state(plan: RunPlan, stored: Stored, run_dir: Path, *, ema: bool) -> TrainState:
    """What an evaluation needs of a checkpoint. Raises `UserError` where it is of another model."""
    whole = identity(plan.config, plan.source)
    now = {"model": whole["model"], "optimizer.lora": whole["optimizer"]["lora"]}
    trained = {**stored.meta, "optimizer.lora": stored.meta.get("optimizer", {}).get("lora", {})}
    for key, (before, value) in check_identity(trained, now, run_dir, force=True).items():
        raise UserError(
            f"{key}: {value!r}, but the model in {run_dir} was trained with {before!r}; leave the key out, a checkpoint"
            " is evaluated as the model that it is"
        )
    target = plan.parts.target
    saved = Saved(stored, key="RUN_DIR", ema=ema)
    saved.mend = "a checkpoint is evaluated as the model that it is, by no longer texts than its table has positions"
    params = saved.load(target, say=lambda line: None)
    return TrainState(stored.step, params, (), model_state=saved.load_model_state(target.model_state))


def write_json(arguments: Namespace, step: int, *, averaged: bool, batches: int, metrics: dict[str, float]) -> None:
    """Write the metrics beside what was evaluated. What is not finite is null: JSON has no NaN."""
    record: dict[str, Any] = {
        "run": arguments.run_dir,
        "step": step,
        "moving_average": averaged,
        "settings": arguments.settings,
        "batches": batches,
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
