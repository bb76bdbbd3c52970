"""Folders of checkpoints that a launcher is told of: from which of them it counts restarts."""

import re
import subprocess
import sys
from pathlib import Path

import child
import pytest

from jaxdist.checkpoint import Checkpoints
from jaxdist.files.launcher_notes import RUN_DIR, STOP_NOTE, folders_note, note_checkpoints
from jaxdist.launcher.headway import Headway


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "stopped"


def environ(note: Path, **more: str) -> dict[str, str]:
    note.parent.mkdir(exist_ok=True)
    return {STOP_NOTE: str(note), RUN_DIR: str(note.parent.parent / "run"), **more}


def save(folder: Path, step: int) -> None:
    (folder / str(step)).mkdir(parents=True)


def test_newer_steps_of_any_folder_are_headway(tmp_path: Path, note: Path) -> None:
    """What was in a folder before the job is none, and a later step elsewhere hides none."""
    own, pretrained, headway = tmp_path / "own", tmp_path / "pretrained", Headway(tmp_path / "run")
    save(own, 3), save(pretrained, 9000)
    for folder in (own, pretrained):
        note_checkpoints(environ(note), folder)
    assert headway.step == -1 and not headway.gained()
    headway.read(note)
    assert not folders_note(note).exists() and not headway.gained()
    save(own, 5)
    assert headway.gained() and headway.step == 5 and not headway.gained()
    save(tmp_path / "run" / "checkpoints", 1)
    assert headway.gained() and headway.step == 1
    headway.read(note)  # of an attempt that has noted nothing
    assert not headway.gained()


def test_who_notes_a_folder(tmp_path: Path, note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a host, of a folder that is not the run's; a line that was cut off is none."""
    for given in (environ(note, LOCAL_RANK="1"), {}):
        note_checkpoints(given, tmp_path / "own")
    for known in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        note_checkpoints(environ(note), known)
    assert not folders_note(note).exists()
    for name, value in environ(note, LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    Checkpoints(tmp_path / "own", keep=1).close()
    assert folders_note(note).read_text() == f"-1 {tmp_path / 'own'}\n"
    with folders_note(note).open("a") as file:
        file.write("12")
    headway = Headway(tmp_path / "run")
    headway.read(note)
    save(tmp_path / "own", 0)
    assert headway.gained() and headway.step == 0


def test_a_note_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note_checkpoints({STOP_NOTE: str(tmp_path / "none" / "stopped")}, tmp_path / "own")
    assert capsys.readouterr().err.startswith(
        f"warning: the launcher is not told of {str(tmp_path / 'own')!r}: No such"
    )


LOOP = """
import os
from pathlib import Path
from jaxdist.files.launcher_notes import note_checkpoints
folder = Path("own").absolute()
note_checkpoints(os.environ, folder)
step = len(list(folder.iterdir())) if folder.exists() else 0
if step < 5:
    (folder / str(step)).mkdir(parents=True)
raise SystemExit(1)
"""


@pytest.mark.slow
def test_a_job_whose_loop_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    """It goes on as long as there are newer ones: five times, and twice without."""
    command = ["launch", "-n", "1", "--max-restarts", "2", "--backoff", "0.1", "--", sys.executable, "-c", LOOP]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdist", *command],
        env=child.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    told = re.findall(r"restart (\d) of 2 without a newer checkpoint than (.*)", done.stderr)
    assert done.returncode == 1 and told == [*(("1", f"step {step}") for step in range(5)), ("2", "step 4")]
