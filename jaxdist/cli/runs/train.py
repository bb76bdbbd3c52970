"""The command `train`."""

import os
from collections.abc import Sequence

from jaxdist.config.load import load_config
from jaxdist.config.shipped import add_config, list_shipped, take_config, with_examples
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.files.launcher_notes import RUN_DIR
from jaxdist.files.regular import remove_empty
from jaxdist.runtime.join.environment import add_job_flags, find_job, take_job_flags
from jaxdist.runtime.output import lasting_output, quiet_job

_EXAMPLES = ("jaxdist train quickstart", "jaxdist train my.yaml mesh.data=8 optimizer.lr=1e-3 --run-dir runs/mine")


@reports_mistakes
def _train(argv: Sequence[str], prog: str) -> int:
    parser = CommandParser(
        prog=prog, description="Train a model as a YAML configuration says.", **with_examples(_EXAMPLES)
    )
    add_config(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept; one that exists is resumed")
    parser.add_argument("--list", action="store_true", help="print the shipped configurations")
    add_job_flags(parser)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.list:
        print(list_shipped())
        return 0
    path, overrides = take_config(parser, arguments)
    take_job_flags(arguments, os.environ)
    config = load_config(path, overrides)
    from jaxdist.trainer.train import run_directory, train

    with quiet_job(config.devices.platform):
        # Processes of a job agree on a name later.
        make = not (arguments.run_dir or os.environ.get(RUN_DIR)) and find_job(os.environ) is None
        folder = run_directory(arguments.run_dir, path, make=make)
        try:
            return train(config, folder)
        finally:
            remove_empty(*(folder, folder.parent) * make)  # made in vain where the run could not begin


def main(argv: Sequence[str], prog: str = "jaxdist train") -> int:
    """Exit status: 0 done, 2 the configuration is wrong, 75 stopped but resumable, 1 anything else."""
    with lasting_output():
        return _train(argv, prog)
