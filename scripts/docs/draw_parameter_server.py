"""Draw K servers beside W workers, measured and by formula: `python scripts/docs/draw_parameter_server.py [OUT_DIR]`.

Measured: docs/measurements/parameter_server_4hosts.json. OUT_DIR: docs/pictures unless given.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from jaxdist.collectives import Link, cost
from jaxdist.collectives.parameter_server import splits

DOCS = Path(__file__).parents[2] / "docs"
HOSTS = 16
NBYTES = 4 * HOSTS * 1000
LINK = Link(latency_s=0.0, bytes_per_s=float(NBYTES))  # N/B is one second
COMPUTE = (0.25, 1.0, 4.0)  # seconds


def main(folder: Path) -> None:
    """Write the picture."""
    mpl.rcParams["svg.hashsalt"] = "jaxdist"
    measured = json.loads((DOCS / "measurements" / "parameter_server_4hosts.json").read_text(encoding="utf-8"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for color, rate in zip(("C0", "C1"), dict.fromkeys(row["rate"] for row in measured["rows"]), strict=True):
        rows = [row for row in measured["rows"] if row["rate"] == rate]
        servers = [row["servers"] for row in rows]
        left.plot(servers, [row["formula"] for row in rows], color=color, label=f"{rate}, formula")
        left.plot(servers, [row["median"] for row in rows], "o", color=color, label=f"{rate}, measured")
    left.set(
        title=f"a synchronisation of {measured['hosts']} hosts, {measured['nbytes'] / 1e6:.0f} MB", ylabel="seconds"
    )
    left.set(xlabel="servers K (workers: the others)", ylim=(0, None), xticks=servers)
    left.legend()
    for index, compute in enumerate(COMPUTE):
        found = splits(NBYTES, HOSTS, compute, LINK)
        alone = HOSTS / compute
        label = f"computation {compute:g} N/B"
        color = f"C{index}"
        right.plot(
            [each.servers for each in found], [each.per_second / alone for each in found], color=color, label=label
        )
        ring = cost("all_reduce", NBYTES, HOSTS).seconds(LINK)
        right.axhline(compute / (compute + ring), color=color, linestyle="dashed")
    right.set(title=f"throughput of {HOSTS} hosts; dashed: a ring of all", xlabel="servers K (workers: the others)")
    right.set(ylabel="of what they compute without communication", ylim=(0, 1))
    right.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "parameter_server.svg", metadata={"Date": None})
    print(folder / "parameter_server.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "pictures")
