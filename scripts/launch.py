"""Start the processes of a job, and again when it fails: python scripts/launch.py -n 4 -- COMMAND ..."""

import sys

from jaxdist.launcher.supervisor import run_launcher
from jaxdist.runtime.output import lasting_output

if __name__ == "__main__":
    with lasting_output():
        sys.exit(run_launcher(sys.argv[1:]))
