"""The command `eval`: the metrics of a checkpoint on held-out data, without training (docs/watching.md)."""

import os
from argparse import Namespace
from collections.abc import Sequence

from jaxdist.config.arguments import output_file, step_of_run
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.files.user_path import user_path
from jaxdist.runtime.join.environment import add_job_flags, take_job_flags
from jaxdist.runtime.output import quiet_job

_EXAMPLES = (
    "jaxdist eval runs/mine --step 300 mesh.data=1 mesh.fsdp=4",
    "jaxdist eval runs/mine --all --json metrics.json data.path=other.txt",
)
# Of a run's settings, those of what only a training writes: the packages and files need not be here.
_WRITES = ("observe.tensorboard=false", "observe.wandb.project=null", "observe.mlflow=null", "observe.plan=null")


def config_of_run(run_dir: str, settings: Sequence[str]) -> Config:
    """The configuration of a run, with settings on top of it. Raises `UserError` for what is no run of `train`."""
    folder = user_path(run_dir, key="RUN_DIR")
    if not (file := folder / "config.yaml").is_file():
        said = "has no config.yaml" if folder.is_dir() else "is no folder"
        made = "; jaxdist checkpoint import makes one of this folder" if (folder / "config.json").is_file() else ""
        if (folder / "checkpoints").is_dir():
            made = "; a run of jaxdist.fit has its model and data in your program: open_pretrained reads its parameters"
        raise UserError(f"RUN_DIR: {run_dir!r} {said}; allowed: the directory of a run of jaxdist train{made}")
    return load_config(file, [*_WRITES, *settings])


def _of_these_data(config: Config, arguments: Namespace) -> Config:
    """The configuration without the held-out file of the run, where other data are given and no such file of theirs."""
    other = any(each.startswith(("data.path=", "data.source=", "data=")) for each in arguments.settings)
    if config.data.val_path is None or not other or any("val_path" in each for each in arguments.settings):
        return config
    return config_of_run(arguments.run_dir, [*arguments.settings, "data.val_path=null"])


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist eval") -> int:
    """Exit status: 0; 2 for wrong arguments, and where the run holds nothing that can be evaluated so.

    >>> from jaxdist.cli.runs.evaluate import main
    >>> main(["no/such/run"])
    2
    """
    parser = CommandParser(
        prog=prog,
        description="Evaluate a checkpoint of a run as the run itself does: the same held-out batches, and the moving"
        " average of a run with train.ema. Nothing is written but --json.",
        **with_examples(_EXAMPLES),
    )
    text = "a run of jaxdist train; then settings on top of its own: mesh, data, train.eval_batches, precision"
    parser.add_argument("words", nargs="*", metavar="RUN_DIR [section.key=value ...]", help=text)
    text = "which checkpoint: its number, or best for the least evaluation loss; default: the newest that is intact"
    parser.add_argument("--step", type=step_of_run, metavar="N", help=text)
    parser.add_argument("--all", action="store_true", help="all held-out batches, whatever train.eval_batches says")
    parser.add_argument("--raw", action="store_true", help="the parameters of a run with train.ema, not their average")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="the metrics, and what was evaluated")
    add_job_flags(parser)
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.words or "=" in arguments.words[0]:
        parser.error("the following arguments are required: RUN_DIR")
    take_job_flags(arguments, os.environ)
    arguments.run_dir, *arguments.settings = arguments.words
    config = _of_these_data(config_of_run(arguments.run_dir, arguments.settings), arguments)
    from jaxdist.cli.work.evaluate import run_eval

    with quiet_job(config.devices.platform):
        return run_eval(arguments, config)
