"""`scripts/bench/gloo.py`: jobs take turns, compute the same, and are compared by what is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from child import QUICK, ROOT, environment
from script_modules import load_module

from jaxdist.lab.network import unavailable

SCRIPT = ROOT / "scripts" / "bench" / "gloo.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = environment() | QUICK | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=path)


@pytest.mark.slow
def test_two_processes_of_each_take_turns(tmp_path: Path) -> None:
    out = tmp_path / "gloo.json"
    names = ["jaxdist-ddp", "jaxdist-zero3"]
    done = run("--size", "toy", "--contenders", ",".join(names), "--rounds", "2", "--steps", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [row["contender"] for row in found["rows"]] == names and found["processes"] == 2
    assert all(len(row["all"]) == 2 and min(row["all"]) > 0 for row in found["rows"])
    assert [line.split(":")[0] for line in done.stdout.splitlines() if "loss" in line] == names


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason="no virtual hosts here")
def test_virtual_hosts_train_one_after_the_other(tmp_path: Path) -> None:
    out, names = tmp_path / "gloo.json", ["jaxdist-ddp", "jaxdist-ddp-ring-int8-1mb"]
    hosts = ("--processes", "2", "--size", "toy", "--rate", "200mbit", "--rounds", "2", "--steps", "1")
    done = run(*hosts, "--contenders", ",".join(names), "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [(row["contender"], len(row["all"])) for row in found["rows"]] == [(name, 2) for name in names]
    assert found["rate"] == "200mbit"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--contenders", "nobody"), "--contenders: 'nobody' is not known; allowed: jaxdist-ddp, torch-ddp, "),
        (("--size", "huge"), "--size: 'huge' is not known; allowed: toy, "),
        (("--processes", "3"), "--processes: 3; allowed: a divisor of the batch's 16 sequences"),
        (("--contenders", "jaxdist-ddp-ring"), "--contenders: 'jaxdist-ddp-ring' is not known; allowed: jaxdist-ddp, "),
        (("--rounds", "1"), "--rounds: 1, --steps: 5; allowed: 2 rounds or more"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_module(SCRIPT).main([*arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1


def test_the_speed_is_that_over_the_same_strategy() -> None:
    gloo = load_module(SCRIPT)
    at = {
        "jaxdist-ddp": 0.2,
        "jaxdist-ddp-ring": 0.1,
        "torch-ddp": 0.3,
        "jaxdist-zero3": 0.4,
        "torch-fsdp2": 0.2,
        "torch-fsdp2-compiled": 0.5,
    }
    rows = [{"contender": name, "seconds": each, "quartiles": [each, each]} for name, each in at.items()]
    lines = dict(zip(at, gloo.text({"rows": rows}), strict=True))
    assert lines["torch-ddp"].endswith("300.0 ms (300.0 to 300.0), jaxdist 1.50 x")
    assert lines["torch-fsdp2"].endswith("jaxdist 0.50 x") and lines["torch-fsdp2-compiled"].endswith("jaxdist 1.25 x")
    assert lines["jaxdist-ddp-ring"].endswith("3.00 x torch-ddp")
    assert not any("jaxdist 1" in lines[name] for name in ("jaxdist-ddp", "jaxdist-zero3"))
