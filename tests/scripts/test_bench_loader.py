"""scripts/bench/loader.py: every contender makes batches of its own, and each round counts once."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from child import ROOT, environment
from script_modules import load_module

SCRIPT = ROOT / "scripts" / "bench" / "loader.py"


def test_it_writes_a_time_for_each_round(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    small = ("--rows", "2", "--length", "8", "--tokens", "1000", "--rounds", "3", "--burst", "2")
    command = [sys.executable, str(SCRIPT), *small, "--json", str(out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["rows"] == 2 and found["length"] == 8
    assert all(len(times) == 3 and min(times) > 0 for times in found["milliseconds"].values())
    lines = done.stdout.splitlines()
    assert lines[0].startswith("jaxdist ") and lines[0].endswith("1.00 x jaxdist's")
    assert len(lines) == len(found["milliseconds"])


def test_its_batches_are_windows_of_the_text() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    batches = load_module(SCRIPT).jaxdist_batches(ids, 2, 8)
    for _ in range(3):
        batch = next(batches)
        assert batch["inputs"].shape == (2, 8)
        np.testing.assert_array_equal(batch["inputs"] + 1, batch["targets"])
