"""What is wrong with this machine or job? Alone, or on every host like train.py: python scripts/doctor.py [--json]"""

import sys

from jaxdist.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
