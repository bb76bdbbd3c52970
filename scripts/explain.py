"""What a configuration will communicate and hold: python scripts/explain.py --config FILE, or `jaxdist explain`"""

import sys

from jaxdist.cli.explain import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "explain.py"))
