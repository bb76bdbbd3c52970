"""Train: python scripts/train.py --config FILE [section.key=value ...] [--run-dir DIR]"""

import os
import sys

from jaxdist.config.load import load_config
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.runtime.join.environment import add_job_flags, take_job_flags
from jaxdist.runtime.output import lasting_output


@reports_mistakes
def main() -> int:
    """Exit status: 0 done, 2 the configuration is wrong, 75 stopped but resumable, 1 anything else."""
    parser = CommandParser(description="Train a model as a YAML configuration says.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file; every key is in docs/config.md")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept; one that exists is resumed")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="on top of the file")
    add_job_flags(parser)
    arguments = parser.parse_intermixed_args()
    take_job_flags(arguments, os.environ)
    config = load_config(arguments.config, arguments.overrides)
    from jaxdist.trainer.train import run_directory, train

    return train(config, run_directory(arguments.run_dir, arguments.config))


if __name__ == "__main__":
    with lasting_output():
        sys.exit(main())
