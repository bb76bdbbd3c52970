"""Keep the figures of a run of configs/quickstart.yaml: `python scripts/docs/record_quickstart.py RUN`.

They go to docs/measurements/quickstart_cpu.json; draw_quickstart.py draws them.
"""

import json
import sys
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[2] / "docs" / "measurements" / "quickstart_cpu.json"


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


if __name__ == "__main__":
    FIGURES.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    print(FIGURES)
