"""scripts/bench/kills.py: runs that are killed and stopped lose nothing."""

import re
import subprocess
import sys
from pathlib import Path

import child
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "kills.py"


def campaign(*arguments: str, timeout: int, script: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", script] if script else [str(SCRIPT)]), *arguments]
    environ = child.environment() | child.QUICK
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    done = campaign("--layouts", "two", "--kills", "3", "--terms", "1", "--steps", "30", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    said = r"3 kills, \d of them during a save: 0 complete checkpoints lost; 1 SIGTERM, .* as if left alone, to the bit"
    assert re.match(said, done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_nothing_is_lost_by_200_kills() -> None:
    done = campaign("--kills", "200", "--terms", "20", timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
