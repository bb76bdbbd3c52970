"""Look after checkpoints: python scripts/checkpoint.py ls|verify|export|import|average, or `jaxdist checkpoint`"""

import sys

from jaxdist.cli.runs.checkpoint import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "checkpoint.py"))
