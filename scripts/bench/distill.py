"""Bits per byte of a student that is distilled, beside the same student trained alone.

    python scripts/bench/distill.py [--out runs/distill] [--seeds 3] [--teacher-steps 600] [--json OUT] [key=value ...]

It trains configs/distill_quickstart.yaml: once with the teacher's width and steps, then for each seed the student alone
and the student with `distill.teacher`, for the same steps on the same data. Runs that are there already are not trained
again. Overrides are those of the student's runs.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.errors import CommandParser, reports_mistakes

CONFIG = Path(__file__).parents[2] / "configs" / "distill_quickstart.yaml"
TEACHER_SEED = 100  # no seed of a student


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    """Train into a folder. Returns {"bits": bits per byte of the held-out text at the end, "parameters": ...}."""
    command = [sys.executable, "-m", "jaxdist.cli.main", "train", str(CONFIG), *overrides, "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    bits = [each["eval/bits_per_byte"] for each in records if "eval/bits_per_byte" in each]
    (parameters,) = {line.split()[-2] for line in done.stdout.splitlines() if line.startswith("model ")}
    return {"bits": bits[-1], "parameters": int(parameters.replace(",", ""))}


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distill"))
    parser.add_argument("--seeds", type=COUNT, default=3)
    parser.add_argument("--teacher-steps", type=COUNT, default=600)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    import jax

    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax {jax.__version__}"
    )
    print(f"{CONFIG.name} on {machine}")
    steps = f"train.steps={arguments.teacher_steps}"
    folder = arguments.out / f"teacher-{arguments.teacher_steps}"
    teacher = train(folder, "model.width=128", steps, f"train.seed={TEACHER_SEED}")
    print(f"teacher: {teacher['parameters']:,} parameters, {teacher['bits']:.4f} bits per byte", flush=True)
    rows: list[dict[str, Any]] = []
    print("| seed | alone | distilled | lower by |\n|---|---|---|---|")
    for seed in range(arguments.seeds):
        given = (f"train.seed={seed}", *arguments.overrides)
        alone = train(arguments.out / f"alone-{seed}", *given)
        taught = train(arguments.out / f"distilled-{seed}", *given, f"distill.teacher={folder}")
        lower = 1 - taught["bits"] / alone["bits"]
        rows.append({"seed": seed, "alone": alone["bits"], "distilled": taught["bits"], "lower": lower})
        print(f"| {seed} | {alone['bits']:.4f} | {taught['bits']:.4f} | {lower:.2%} |", flush=True)
    mean = {name: statistics.mean(row[name] for row in rows) for name in ("alone", "distilled", "lower")}
    print(f"| mean | {mean['alone']:.4f} | {mean['distilled']:.4f} | {mean['lower']:.2%} |")
    share = alone["parameters"] / teacher["parameters"]
    print(f"student: {alone['parameters']:,} parameters, {share:.1%} of the teacher's")
    if arguments.json:
        found = {"machine": machine, "teacher": teacher, "student_parameters": alone["parameters"], "runs": rows}
        arguments.json.write_text(json.dumps(found | {"mean": mean}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
