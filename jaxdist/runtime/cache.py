"""The persistent compilation cache (`devices.compilation_cache`): its folder, and who may write there.

An entry is machine code that this process will run, so a folder that others can write to is refused.
"""

import logging
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax

from jaxdist.errors import UserError
from jaxdist.processes import from_all
from jaxdist.runtime.rank_names import name_ranks

CACHE_KEY = "devices.compilation_cache"
HIT = "/jax/compilation_cache/cache_hits"  # jax's name of the event


def default_folder(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/jaxdist/jax-VERSION, or the same under ~/.cache."""
    given = environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"  # a relative one is to be ignored (XDG)
    return base / "jaxdist" / f"jax-{jax.__version__}"


def check_private(folder: Path) -> None:
    """Raise `UserError` if somebody else could put an entry into this folder, or another folder in its place."""
    folder = folder.resolve()
    mend = f"allowed: a folder of your own; chmod go-w {folder}, or {CACHE_KEY}=false"
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(f"{CACHE_KEY}: {str(folder)!r} can be changed by others, and its programs are run; {mend}")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(
                f"{CACHE_KEY}: {str(folder)!r} lies in {str(parent)!r}, where others could replace it; {mend}"
            )


def why_off(value: str | bool, backend: str) -> str | None:
    """Why there is no cache on this backend, or None. value: true, false or a folder."""
    if value is False:
        return f"{CACHE_KEY}=false"
    # jax 0.10.2 and 0.12.0.1: programs with collectives, loaded on simulated devices, hang or crash.
    return "on CPUs programs hang that jax loads" if backend == "cpu" else None


def set_up(value: str | bool, backend: str) -> None:
    """Turn the cache on for programs that compile from now on. Does nothing where JAX_COMPILATION_CACHE_DIR or
    JAX_ENABLE_COMPILATION_CACHE is in the environment. A given folder that cannot be made or is not private is a
    `UserError`; the default folder is then not used, with a warning. Every process of a job must call it.
    """
    given = bool({"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"} & set(os.environ))
    default = value is True and not given
    if jax.process_count() > 1 and backend == "gpu":  # ranks may differ in the key and in their environments
        others = [rank for rank, each in enumerate(from_all(default)) if not each]
        if default and others:
            _warn(f"{CACHE_KEY}: true, and something else for {name_ranks(others)}")
            return
    if given or why_off(value, backend):
        return
    try:
        folder = _shared_default() if default and jax.process_count() > 1 else _made(value)
        jax.config.update("jax_compilation_cache_dir", str(folder))
    except UserError as error:
        if value is not True:
            raise
        _warn(str(error))


def _warn(why: str) -> None:
    if jax.process_index() == 0:
        logging.getLogger(__name__).warning("no compilation cache: %s", why)


def _shared_default() -> Path:
    """The default folder, if it is the same one for all processes of the job; else a `UserError` in all of them.

    Only process 0 writes. If the others could not read its folder, they would compile while it does not, and XLA:GPU's
    autotuning, which is divided among the processes, would wait for a share that never comes.
    """
    folder, error, mark = None, "", ""
    try:
        folder = _made(True)
        if jax.process_index() == 0:
            own = folder / f"seen-{secrets.token_hex(8)}"
            own.touch()
            mark = own.name
    except (UserError, OSError) as found:
        error = f"{CACHE_KEY}: {str(found).removeprefix(f'{CACHE_KEY}: ')}"
    mark = from_all(mark)[0]
    seen = from_all(bool(mark and folder and _is_there(folder / mark)))
    if mark and folder and jax.process_index() == 0:
        (folder / mark).unlink(missing_ok=True)
    if blind := [rank for rank, each in enumerate(seen) if not each]:
        raise UserError(
            error
            or f"{CACHE_KEY}: {str(folder)!r} of rank 0 is not that of {name_ranks(blind)}; allowed: a folder that all"
            " ranks can read, or false"
        )
    assert folder is not None  # all have seen the mark in it
    return folder


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # the folder may not be entered
        return False


def _made(value: str | bool) -> Path:
    """Make the folder if it is not there. Raises `UserError`."""
    try:
        folder = default_folder(os.environ) if value is True else Path(str(value)).expanduser()
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder)
        return folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        named = str(getattr(error, "filename", None) or value)
        raise UserError(
            f"{CACHE_KEY}: {named!r}: {getattr(error, 'strerror', None) or error}; allowed: a folder that can be"
            " written to, or false"
        ) from error


def folder_in_use() -> str | None:
    """The folder where JAX keeps compiled programs, or None."""
    return jax.config.values["jax_compilation_cache_dir"] if jax.config.values["jax_enable_compilation_cache"] else None


class CacheHits:
    """A context that counts the programs which come from the cache. Without a cache the count stays 0."""

    def __init__(self) -> None:
        self.count = 0

    def _listen(self, event: str, **_: Any) -> None:
        self.count += event == HIT

    def __enter__(self) -> Self:
        jax.monitoring.register_event_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._listen)


def cache_row(value: str | bool, backend: str, hits: int) -> str | None:
    """A line about the cache for the header of a run; None where there is no cache and no folder was given."""
    folder, why = folder_in_use(), why_off(value, backend)
    if folder is not None:
        return f"{folder}, {hits} programs from it so far" if hits else f"{folder}, nothing from it so far"
    return f"off: {why}" if why and isinstance(value, str) else None
