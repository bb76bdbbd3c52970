"""`scripts/bench/gpu_suite.py`, rehearsed on a CPU: every part runs, and a part that fails costs the others nothing."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_suite
import pytest
from child import QUICK, ROOT, environment
from harness.gpu import PARTS
from harness.gpu.agreement import _apart

pytestmark = pytest.mark.xdist_group("gpu suite")


def rehearse(tmp_path: Path, *parts: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    command = [sys.executable, "scripts/bench/gpu_suite.py", "--tiny", "--parts", ",".join(parts), "--json", str(out)]
    environ = environment() | QUICK | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())["parts"]
    assert not [path for path in tmp_path.iterdir() if path != out]
    return {name: part["found"] for name, part in found.items()}


@pytest.mark.slow
def test_quick_parts(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "facts", "kernels", "tiles", "rates")
    assert found["facts"]["backend"] == "cpu"
    for part, cases in {"kernels": 6, "tiles": 4}.items():
        assert len(found[part]) == cases
        assert all(x < 0.01 for case in found[part].values() for x in case["plain, bf16"])
    assert all(value > 0 for value in found["rates"].values() if isinstance(value, float))


@pytest.mark.slow
def test_parts_that_train(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "agree", "same_bits", "steps")
    assert all(value < 1e-5 for value in found["agree"]["differences"].values())
    assert found["same_bits"]["same"] is True
    assert [len(each["timings"]) for each in found["steps"].values()] == [1, 1]


@pytest.mark.exhaustive
def test_the_other_parts(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "runs", "larger", "profile", "race")
    assert {each["exit_status"] for each in found["runs"].values()} == {0}
    assert [len(each["timings"]) for each in found["larger"].values()] == [1, 1]
    assert found["profile"] == {"scanned": [], "unrolled": []}
    assert found["race"]["toy"]["sizes"][0]["differs"] == ""


def test_a_part_that_hangs_or_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "suite.py").write_text(
        "import json, sys, time\n"
        "name, out = sys.argv[2], sys.argv[4]\n"
        "open(out, 'w').write(json.dumps(name))\n"
        "time.sleep(60 * (name == 'runs'))\n"
        "sys.exit(name == 'agree')\n"
    )
    monkeypatch.setattr(gpu_suite, "__file__", str(tmp_path / "suite.py"))
    monkeypatch.setattr(gpu_suite, "LEAST_S", 0.0)
    arguments: Any = SimpleNamespace(json=str(tmp_path / "out.json"), tiny=False, parts="", limit_s=0)
    found = [gpu_suite.in_own_process(name, arguments, 1.0) for name in ("runs", "agree", "facts")]
    assert [(each["exit_status"], each["found"]) for each in found] == [(-9, "runs"), (1, "agree"), (0, "facts")]


def test_an_unknown_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--json", str(tmp_path / "out.json"), "--parts", "run"])
    assert gpu_suite.main() == 2
    assert capsys.readouterr().err == f"error: --parts: 'run' is not known; allowed: {', '.join(PARTS)}\n"


def test_differences() -> None:
    one, other = {"steps": [[1.0, 2.0], [4.0, 8.0]]}, {"steps": [[1.0, 2.5], [5.0, 8.0]]}
    assert _apart(one, other) == pytest.approx(0.2)
    assert _apart(one, {"exit_status": 1}) is None


def test_a_part_fails_with_a_command_or_a_contender_of_it() -> None:
    fine = {"exit_status": 0, "output": ""}
    assert not gpu_suite.has_failed({"steps": fine, "losses": [1.0], "other": {"step_s": 0.1}})
    assert not gpu_suite.has_failed({"steps": {"exit_status": gpu_suite.NO_MEMORY, "output": ""}})
    race = {"differs": "", "contenders": [{"name": "a"}, {"name": "b", "failed": "not installed: torch"}]}
    assert not gpu_suite.has_failed({"124m": race})
    for bad in (
        {"exit_status": 1, "output": "error"},
        {"exit_status": "timed out", "output": ""},
        gpu_suite.NOTHING,
        {"skipped": "20 s left of --limit-s"},
        {**race, "differs": "b: loss 3 in place of 4"},
        {**race, "contenders": [{"name": "a", "failed": "ValueError: x"}]},
    ):
        assert gpu_suite.has_failed({"first": fine, "second": {"deeper": bad}}), bad
