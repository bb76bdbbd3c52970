"""Try whether a Ray cluster lets this program in: python -m jaxdist.elastic.probe ADDRESS. Status 0: it does."""

import os
import sys

from jaxdist.elastic.cluster import load_ray


def try_cluster(address: str) -> None:
    """Join the cluster. Whoever has started this ends it where Ray goes on waiting."""
    load_ray().init(address=address, configure_logging=False, log_to_driver=False)
    os._exit(0)  # leaving in good order takes a second


if __name__ == "__main__":
    try_cluster(sys.argv[1])
