"""Does a mixture of experts learn more from the same work? The dense quickstart beside configs/moe_quickstart.yaml, at
equal steps and equal work for each byte, for several seeds:

    python scripts/bench/experts.py [--seeds 3] [--json OUT] [section.key=value ...]

Both run on one device, since a run has the same loss in every layout. With --json each run is written as it ends, and
one that is there already is not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.config.shipped import find_config
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.observe import measured_on, read_metrics

CONFIGS = {"dense": "quickstart", "experts": "moe_quickstart"}
ALWAYS = (
    "mesh={data: 1, fsdp: 1, expert: 1, tensor: 1}",
    "devices.simulated=1",
    "observe.report=false",
    "train.sample_tokens=0",
    "checkpoint.every=0",
)
FIGURES = ("eval/bits_per_byte", "experts/max_load")


def run(config: str, seed: int, overrides: list[str]) -> dict[str, float]:
    """What the last line of metrics says. Raises `UserError` where the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxdist.cli.main", "train", "--config", find_config(config)]
        command += ["--run-dir", folder, *ALWAYS, f"train.seed={seed}", *overrides]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise UserError(f"a run ended with status {result.returncode}: {result.stderr.strip()[-500:]}")
        lines = read_metrics(Path(folder) / "metrics.jsonl")
    return {name: lines[-1][name] for name in FIGURES if name in lines[-1]}


@reports_mistakes
def main(argv: list[str]) -> int:
    """Exit status: 0 the mixture is below the dense model for every seed; 1 it is not; 2 a run failed."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=COUNT, default=3)
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    out, runs = arguments.json, dict[str, dict[str, Any]]()
    if out is not None and out.exists():
        runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    for seed in range(arguments.seeds):
        for name, config in CONFIGS.items():
            if str(seed) in (known := runs.setdefault(name, {})):
                continue
            known[str(seed)] = run(config, seed, arguments.overrides)
            print(f"{name}, seed {seed}: {known[str(seed)]}", file=sys.stderr, flush=True)
            if out is not None:
                out.write_text(json.dumps(measured_on() | {"runs": runs}, indent=1) + "\n", encoding="utf-8")
    bits = {name: [runs[name][str(seed)]["eval/bits_per_byte"] for seed in range(arguments.seeds)] for name in CONFIGS}
    for name, values in bits.items():
        print(f"{name:8} bits per byte {', '.join(f'{value:.3f}' for value in values)}")
    return 0 if all(b < a for a, b in zip(bits["dense"], bits["experts"], strict=True)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
