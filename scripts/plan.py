"""Will a step fit GPUs that are not there? python scripts/plan.py --compile --config FILE, or `jaxdist plan`"""

import sys

from jaxdist.cli.plan import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "plan.py"))
