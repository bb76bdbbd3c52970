"""What is wrong with this machine or job? Alone, or on every host like train.py: python scripts/doctor.py [--json]"""

import sys

from jaxdist.cli.doctor import run_doctor

if __name__ == "__main__":
    sys.exit(run_doctor(sys.argv[1:]))
