"""Start the processes of a job: python scripts/launch.py -n 4 -- COMMAND ..., or `jaxdist launch`"""

import sys

from jaxdist.cli.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "launch.py"))
