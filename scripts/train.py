"""Train: python scripts/train.py --config FILE [section.key=value ...] [--run-dir DIR], or `jaxdist train`"""

import sys

from jaxdist.cli.runs.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "train.py"))
