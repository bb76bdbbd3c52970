"""How far a job has come, by its newest checkpoints: what it does again after a restart is what came after them."""

from pathlib import Path

from jaxdist.files.launcher_notes import folders_note, latest_step


class Headway:
    """The newest step of each folder of checkpoints of a job: of its run directory, and of those that its processes
    have noted (`note_checkpoints`), as loops of one's own do.

    step: of the folder in which a newer one was found last; at first that of the run directory. -1: none.
    """

    def __init__(self, run_dir: Path) -> None:
        self.step = latest_step(run_dir)
        self._newest = {run_dir: self.step}

    def read(self, stop_note: Path) -> None:
        """Take the folders that processes of an attempt have noted, and remove their note."""
        note = folders_note(stop_note)
        lines = note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
        for line in lines:
            step, _, folder = line.partition(" ")
            if step.removeprefix("-").isdecimal() and folder:  # a line that a full disk has cut is none
                self._newest.setdefault(Path(folder), int(step))
        note.unlink(missing_ok=True)

    def gained(self) -> bool:
        """Whether there is a newer checkpoint in any of the folders since the last call."""
        now = {folder: latest_step(folder) for folder in self._newest}
        newer = [step for folder, step in now.items() if step > self._newest[folder]]
        self._newest, self.step = now, max(newer, default=self.step)
        return bool(newer)
