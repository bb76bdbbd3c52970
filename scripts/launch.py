"""Start the processes of a job: python scripts/launch.py -n 4 -- COMMAND ..., or `jaxdist launch`"""

import sys

from jaxdist.launcher.supervisor import run_launcher

if __name__ == "__main__":
    sys.exit(run_launcher(sys.argv[1:], "launch.py"))
