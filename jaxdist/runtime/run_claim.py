"""The claim of one job on a run directory: two runs in one directory would remove each other's checkpoints.

Process 0 holds a lock of the operating system on `run.lock` as long as it lives, so that a killed run leaves no claim.
The file names the owner: host, process, job, time. Where the storage has no locks, only that text tells.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Self

from jaxdist.errors import UserError
from jaxdist.files.launcher_notes import ATTEMPT
from jaxdist.files.regular import identity_of, open_regular, remove_empty, replace_file
from jaxdist.runtime.network.addresses import host_name

LOCK = "run.lock"
OWNER_LEAVES_S = 2.0  # until a process that was killed must have left
RESTARTED_S = 20.0  # the same for one of an earlier attempt of this job; the other processes wait meanwhile
ASK_AGAIN_S = 0.1
TEXTS_SETTLE_S = 1.0  # without locks: until the text of two that came at once is the same for both
JOBS = ("SLURM_JOB_ID", "JAXDIST_JOB_ID", "TORCHELASTIC_RUN_ID")
# The variables that count a job's starts, with their values at the first one.
RESTARTS = ((ATTEMPT, 1), ("SLURM_RESTART_COUNT", 0), ("TORCHELASTIC_RESTART_COUNT", 0))


class Owner(NamedTuple):
    """Who has claimed a run directory."""

    host: str
    pid: int
    job: str
    since: str
    directory: int  # its inode: a copy of the directory holds the text, too

    def describe(self) -> str:
        """Such as "process 12 on host a (job 3, since 2026-11-24 10:00:00)"."""
        job = f"job {self.job}, " if self.job else ""
        return f"process {self.pid} on host {self.host} ({job}since {self.since})"

    def is_dead(self) -> bool:
        """Whether it was a process of this host and is gone. What is on other hosts is not known."""
        if self.host != host_name():
            return False
        if self.pid == os.getpid() == 1:  # of a container that was started again: the number is that of this process
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is somebody else's
            return False
        return False


def _owner_in(descriptor: int) -> Owner | None:
    """The owner that a lock file names, None where it names none. The text may be anybody's."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        owner = Owner(**{name: kind(found[name]) for name, kind in Owner.__annotations__.items()})
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    printable = (owner.host + owner.job + owner.since).isprintable()
    return owner if printable and 0 < owner.pid < 1 << 31 else None


def _lock(descriptor: int) -> bool | None:
    """Whether this process has the lock now. None: there are no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _job(environ: Mapping[str, str]) -> str:
    """The name of this process's job, the same in all its attempts; "" where it has none."""
    name = next((name for name in JOBS if environ.get(name, "none") != "none"), "")
    # that of a launcher is NAME-ATTEMPT
    return environ[name].rpartition("-")[0] or environ[name] if name == "JAXDIST_JOB_ID" else environ.get(name, "")


def _restarted(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this job again."""
    return any(int(environ[name]) > first for name, first in RESTARTS if environ.get(name, "").isdecimal())


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _leads_to(path: Path) -> tuple[int, int] | None:
    """As `identity_of`, but of what a link leads to."""
    with suppress(OSError):
        return _identity(path.stat())
    return None


class RunClaim:
    """The claim of this process on a run directory, which is made if it is not there. Use it as a context.

    Raises `UserError` where another run has it, or nothing can be written there; nothing is changed then.

    - path: the run directory.
    - say: is called with one line about an owner that is waited for or has died.
    """

    def __init__(
        self, path: Path, environ: Mapping[str, str] = os.environ, say: Callable[[str], None] | None = None
    ) -> None:
        # A relative path would go on leading to the directory where the folder above both is moved.
        self._path, self._at = path, path.absolute()
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._restarted, self._locks = _restarted(environ), True
        self._job = _job(environ)
        self._lock, self._directory, self._made = -1, -1, list[Path]()
        self._owner: Owner | None = None  # this process, once it is
        try:
            self._made = [each for each in (path / "checkpoints", path, *path.parents) if not each.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._own = _identity(os.fstat(self._directory))
            self._take()
        except OSError as error:
            self.close()
            what = f"--run-dir: {str(error.filename or path)!r} cannot be written: {error.strerror}"
            raise UserError(f"{what}; mend it, or give another folder") from error
        except UserError:
            self.close()
            raise

    def _take(self) -> None:
        """Wait until the lock is this process's, and write its name. Raises `UserError`."""
        begun, told = time.monotonic(), False
        while True:
            descriptor = open_regular(self._path / LOCK, os.O_RDWR | os.O_CREAT)
            try:
                if self._try(descriptor):
                    self._lock, descriptor = descriptor, -1
                    return
                owner = _owner_in(descriptor)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            if time.monotonic() - begun > (RESTARTED_S if self._restarted else OWNER_LEAVES_S):
                raise UserError(self._refusal(owner))
            if self._restarted and owner is not None and not told:
                self._say(f"waiting for {owner.describe()} to leave {self._path}, up to {RESTARTED_S:.0f} s")
                told = True
            time.sleep(ASK_AGAIN_S)

    def _try(self, descriptor: int) -> bool:
        """Whether this process is the owner now. descriptor: of the lock file."""
        locked, owner = _lock(descriptor), _owner_in(descriptor)
        self._locks = locked is not None
        if _identity(os.fstat(descriptor)) != identity_of(self._path / LOCK):
            return False  # its last owner has removed it
        directory = self._own[1]
        copied = owner is not None and owner.directory != directory
        if copied and os.fstat(descriptor).st_nlink > 1:  # by hard links: the lock is the original's, too
            replace_file(self._path / LOCK, b"")
            return False
        if locked is False:
            return False
        if os.fstat(descriptor).st_nlink > 1:  # its other name is somebody else's file
            replace_file(self._path / LOCK, b"")
            return False
        if owner is not None and not copied:
            if locked is None and not owner.is_dead() and not (self._restarted and owner.job == self._job):
                return False
            if locked is None or owner.host != host_name():
                self._say(f"{owner.describe()} has left {self._path} without an end; this run takes its place")
        now = datetime.now().isoformat(" ", "seconds")
        own = Owner(host_name(), os.getpid(), self._job, now, directory)
        text = (json.dumps(own._asdict()) + "\n").encode()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)
        except OSError:
            (self._path / LOCK).unlink()
            raise
        self._owner = own
        if locked is None:
            time.sleep(TEXTS_SETTLE_S)
        return bool(locked) or _owner_in(descriptor) == own

    def _refusal(self, owner: Owner | None) -> str:
        file, whose = repr(str(self._path / LOCK)), "another process" if owner is None else owner.describe()
        mend = "wait for it or stop it, or use another --run-dir"
        if not self._locks:
            mend += f"; this storage has no locks to tell whether it lives: if it does not, remove {file}"
        elif owner is not None and owner.is_dead():
            mend += "; it has ended, but a process that it left behind holds the lock"
        elif owner is not None and owner.host != host_name():
            mend += f"; if that host is dead and its lock stays, remove {file}"
        return f"--run-dir: {str(self._path)!r} belongs to a run under way, {whose}; {mend}"

    def is_moved(self) -> bool:
        """Whether the path no longer leads to the directory. Raises `UserError` where another run has taken it over."""
        try:
            if _identity(self._at.stat()) != self._own:
                return True
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # the storage does not answer now: the next step asks again
            return False
        lock = identity_of(self._at / LOCK)
        other = not self._locks and _owner_in(self._lock) != self._owner  # that another run has written
        if other or (lock is not None and lock != _identity(os.fstat(self._lock))):
            raise UserError(
                f"--run-dir: {str(self._path / LOCK)!r} is not this run's any more: another run has been let in, so"
                " this one ends, without saving"
            )
        return False

    def _find(self) -> Path | None:
        """Where the directory is now, None where it was removed or cannot be found."""
        places = [self._at]
        with suppress(OSError):  # there is no such file but on Linux
            places.append(Path(f"/proc/self/fd/{self._directory}").readlink())
        return next((place for place in places if _leads_to(place) == self._own), None)

    def follow(self) -> Path:
        """The path of the directory, which may have been moved. Where it was removed, this is where it was.

        Raises `UserError` where it was removed, or cannot be found, and another one is in its place.
        """
        found = self._find()
        if found is None and self._at.exists():
            raise UserError(
                f"--run-dir: {str(self._path)!r} is another directory than this run began in, which is gone, so this"
                " run ends, without saving"
            )
        return self._path if found in (None, self._at) else found

    def close(self) -> None:
        """Give the directory up. What this process made and nothing was written into is removed."""
        if self._directory >= 0 and _leads_to(self._at) != self._own:
            self._made = []  # what is there now is somebody else's
        if self._lock >= 0:
            lock = (self._find() or self._at) / LOCK
            if identity_of(lock) == _identity(os.fstat(self._lock)):
                with suppress(OSError):  # of a disk that is read-only now: nobody holds the lock that is left
                    lock.unlink()
            os.close(self._lock)
        if self._directory >= 0:
            os.close(self._directory)
        self._lock = self._directory = -1
        remove_empty(*self._made)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
