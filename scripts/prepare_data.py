"""Text to token ids: python scripts/prepare_data.py INPUT ... --out DIR, or `jaxdist data`"""

import sys

from jaxdist.cli.data import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "prepare_data.py"))
