"""Start the processes of a job, and again when it fails: python scripts/launch.py -n 4 -- COMMAND ..."""

import sys

from jaxdist.launcher.supervisor import run_launcher

if __name__ == "__main__":
    sys.exit(run_launcher(sys.argv[1:]))
