"""What is wrong with this machine or job? python scripts/doctor.py [--json], or `jaxdist doctor`"""

import sys

from jaxdist.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "doctor.py"))
