"""Start the processes of a job, and again when it fails: python scripts/launch.py -n 4 -- COMMAND ..."""

import sys

from jaxdist.launcher.supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
