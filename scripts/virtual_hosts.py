"""A laboratory for slow networks: python scripts/virtual_hosts.py -n 4 --rate 200mbit -- COMMAND, or `jaxdist lab`"""

import sys

from jaxdist.lab.command import run_lab

if __name__ == "__main__":
    sys.exit(run_lab(sys.argv[1:], "virtual_hosts.py"))
