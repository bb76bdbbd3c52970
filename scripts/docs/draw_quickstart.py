"""Draw the picture of README: `python scripts/docs/draw_quickstart.py [RUN]`.

It shows the loss of a run of configs/quickstart.yaml beside its mesh. RUN, the directory of such a run, replaces the figures
that are kept in docs/measurements/quickstart_cpu.json.
"""

import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "measurements" / "quickstart_cpu.json"
PICTURE = DOCS / "pictures" / "quickstart.svg"
BLUE, RED, GREY = "#3b6fb6", "#c4442e", "#667"
X0, X1, Y0, Y1 = 70, 470, 44, 268  # the axes of the curve
LOW, HIGH = 2.0, 8.0  # bits per byte


def read(run: Path) -> dict[str, Any]:
    """What the picture needs of a run: losses in nats, evaluations in bits per byte, yardsticks, versions."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    environment = json.loads((run / "env.json").read_text(encoding="utf-8"))
    key = "eval/bits_per_byte"
    return {
        "command": "python scripts/train.py --config configs/quickstart.yaml",
        "date": environment["time_utc"][:10],
        "versions": {name: environment["versions"][name] for name in ("python", "jax", "flax")},
        "machine": f"{environment['cpu_count']} CPU cores, {environment['devices']['cpu']} simulated devices",
        "mesh": {axis: size for axis, size in environment["mesh"].items() if size > 1},
        "yardsticks": {"bigram": 3.547, "trigram": 2.494},  # as the run's header prints them
        "loss": [round(line["loss"], 4) for line in lines],
        "bits_per_byte": {line["step"]: round(line[key], 4) for line in lines if key in line},
    }


def text(x: float, y: float, words: str, *, size: int = 13, colour: str = "#223", anchor: str = "start") -> str:
    """A line of text at x, y."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def curve(kept: dict[str, Any]) -> list[str]:
    """Training loss as a line, evaluations as dots, the n-gram models as dashes."""
    steps = len(kept["loss"])

    def x(step: float) -> float:
        return X0 + (X1 - X0) * step / steps

    def y(bits: float) -> float:
        return Y1 - (Y1 - Y0) * (min(bits, HIGH) - LOW) / (HIGH - LOW)

    parts = [text(X0, 24, "bits per byte, byte-level GPT on Python's library", size=14)]
    for bits in range(int(LOW), int(HIGH) + 1, 2):
        parts.append(f'<path d="M{X0} {y(bits):.1f}H{X1}" stroke="#dde"/>')
        parts.append(text(X0 - 8, y(bits) + 4, str(bits), colour=GREY, anchor="end"))
    for step in range(0, steps + 1, 40):
        parts.append(text(x(step), Y1 + 18, str(step), colour=GREY, anchor="middle"))
    parts.append(text((X0 + X1) / 2, Y1 + 36, "step", colour=GREY, anchor="middle"))
    for name, bits in kept["yardsticks"].items():
        parts.append(f'<path d="M{X0} {y(bits):.1f}H{X1}" stroke="{RED}" stroke-dasharray="5 4"/>')
        place = (X1 - 4, y(bits) - 5, "end") if bits > 3 else (X0 + 6, y(bits) + 15, "start")  # not on the curve
        parts.append(text(*place[:2], f"{name} model {bits}", size=12, colour=RED, anchor=place[2]))
    points = [f"{x(step + 1):.1f} {y(loss / math.log(2)):.1f}" for step, loss in enumerate(kept["loss"])]
    parts.append(f'<path d="M{" L".join(points)}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>')
    for step, bits in kept["bits_per_byte"].items():
        parts.append(f'<circle cx="{x(int(step)):.1f}" cy="{y(bits):.1f}" r="4.5" fill="{BLUE}"/>')
    last = list(kept["bits_per_byte"].values())[-1]
    parts.append(text(X0 + 60, y(6.6), "line: training loss", colour=BLUE))
    parts.append(text(X0 + 60, y(6.6) + 18, f"dots: held-out text, at last {last:.3f}", colour=BLUE))
    return parts


def mesh(kept: dict[str, Any]) -> list[str]:
    """The devices by their coordinates, and what each axis does."""
    parts = [text(530, 24, "8 devices: " + " ".join(f"{k}={v}" for k, v in kept["mesh"].items()), size=14)]
    for data, fsdp, tensor in product(range(2), repeat=3):
        left, top = 530 + 150 * data + 70 * tensor, 50 + 66 * fsdp
        fill = ("#d8e6f6", "#f6e3c8")[fsdp]
        parts.append(f'<rect x="{left}" y="{top}" width="62" height="56" rx="6" fill="{fill}" stroke="#889"/>')
        parts.append(text(left + 31, top + 25, f"fsdp {fsdp}", size=12, anchor="middle"))
        parts.append(text(left + 31, top + 42, f"tensor {tensor}", size=12, anchor="middle"))
    parts += [text(596 + 150 * data, 198, f"data {data}", colour=GREY, anchor="middle") for data in range(2)]
    about = ("data: other rows of the batch", "fsdp: other rows, a part of all parameters")
    lines = [*about, "tensor: a part of each layer, on the same rows"]
    return parts + [text(530, 228 + 19 * row, words, size=12) for row, words in enumerate(lines)]


def draw(kept: dict[str, Any]) -> str:
    """The picture as SVG text, on white: pages are dark for some readers."""
    last = list(kept["bits_per_byte"].values())[-1]
    title = (
        f"Loss of the quickstart over {len(kept['loss'])} steps, at last {last:.3f} bits per byte on held-out text,"
        f" below the trigram model's {kept['yardsticks']['trigram']}; beside it the mesh of 8 simulated devices"
    )
    foot = f"{kept['machine']}, jax {kept['versions']['jax']}, {kept['date']}"
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 320" font-family="sans-serif" role="img">'
    inside = [*curve(kept), *mesh(kept), text(848, 310, foot, size=11, colour=GREY, anchor="end")]
    return "\n".join([head, f"<title>{title}</title>", '<rect width="860" height="320" fill="#fff"/>', *inside, "</svg>\n"])


if __name__ == "__main__":
    if sys.argv[1:]:
        FIGURES.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PICTURE)
