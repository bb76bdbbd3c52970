"""Draw the picture of README, the loss of a run of configs/quickstart.yaml beside its mesh.

Its figures are those of docs/measurements/quickstart_cpu.json, which record_quickstart.py writes.
"""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parents[2] / "docs"
PICTURE = DOCS / "pictures" / "quickstart.svg"
HEADING: Any = {"fontsize": 10, "loc": "left"}
AXES = ("data: other rows of the batch", "fsdp: other rows, a part of all parameters", "tensor: a part of each layer")


def draw_loss(kept: dict[str, Any], ax: Axes) -> None:
    """Training loss as a line, evaluations as dots, the n-gram models as dashes."""
    steps, losses = len(kept["loss"]), [loss / math.log(2) for loss in kept["loss"]]
    ax.set_title("bits per byte of a byte-level GPT on Python's library", **HEADING)
    ax.plot(range(1, steps + 1), losses, label="training")
    found = {int(step): bits for step, bits in kept["bits_per_byte"].items()}
    ax.plot(list(found), list(found.values()), "o", label=f"held-out text, at last {found[steps]:.3f}")
    for style, (name, bits) in zip(("--", ":"), kept["yardsticks"].items(), strict=True):
        ax.axhline(bits, color="tab:red", linestyle=style, label=f"{name} model {bits}")
    ax.set(xlabel="step", xlim=(0, steps + 3), ylim=(2, 8))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)


def draw_mesh(kept: dict[str, Any], ax: Axes) -> None:
    """The devices by their coordinates, and what each axis does."""
    ax.set_title("8 devices: " + " ".join(f"{axis}={size}" for axis, size in kept["mesh"].items()), **HEADING)
    for data, fsdp, tensor in product(range(2), repeat=3):
        left, bottom, colour = 2.2 * data + tensor, 1 - fsdp, ("#d8e6f6", "#f6e3c8")[fsdp]
        ax.add_patch(FancyBboxPatch((left, bottom), 0.8, 0.8, boxstyle="round,pad=0.02", fc=colour, ec="#889"))
        ax.text(left + 0.4, bottom + 0.4, f"fsdp {fsdp}\ntensor {tensor}", ha="center", va="center", fontsize=8)
    for data in range(2):
        ax.text(2.2 * data + 0.9, -0.3, f"data {data}", ha="center", fontsize=8)
    for row, words in enumerate(AXES):
        ax.text(0, -0.75 - 0.3 * row, words, fontsize=9)
    ax.set(xlim=(-0.1, 4.1), ylim=(-1.5, 1.9))
    ax.axis("off")


if __name__ == "__main__":
    kept = json.loads((DOCS / "measurements" / "quickstart_cpu.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")  # pages are dark for some readers
    loss, mesh = figure.subplots(1, 2, width_ratios=(5, 4))
    draw_loss(kept, loss)
    draw_mesh(kept, mesh)
    about = f"{kept['machine']}, jax {kept['versions']['jax']}, {kept['date']}"
    figure.text(0.995, 0.01, about, fontsize=7, color="#667", ha="right")
    figure.savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)
