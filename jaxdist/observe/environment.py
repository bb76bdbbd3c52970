"""The environment of a run for env.json, without secrets: versions, devices, command, and a few variables.

Only variables on an allow-list are recorded. If their names look like secrets, the values are redacted. So are
assignments to such names in the command, and user names and passwords in URLs.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.files.regular import replace_file

REDACTED = "[redacted]"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxdist")
_ALLOWED = re.compile(
    r"XLA_FLAGS|XLA_PYTHON_CLIENT_\w+|LIBTPU_INIT_ARGS|JAX_\w+|JAXDIST_\w+|NCCL_\w+|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)"
    r"|NVIDIA_VISIBLE_DEVICES|TF_GPU_ALLOCATOR|OMP_NUM_THREADS"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|NNODES|NTASKS|NTASKS_PER_NODE|PROCID|LOCALID|NODEID|STEP_ID|GPUS_ON_NODE|CPUS_PER_TASK)"
    r"|OMPI_COMM_WORLD_(SIZE|RANK|LOCAL_RANK|LOCAL_SIZE)|(LOCAL_|NODE_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE"
)
_WORDS = r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL"
_SECRET = re.compile(_WORDS, re.IGNORECASE)
# Keys of jaxdist's own configuration that hold one of the words and no secret; a record without them cannot be rerun.
_HARMLESS = frozenset({"train.sample_tokens", "data.token_dtype"})
_ASSIGNMENT = re.compile(
    rf"""(?P<name>[\w.\-]*(?:{_WORDS})[\w.\-]*)(?P<equals>["']?\s*[=:]\s*)(?P<value>"[^"]*"|'[^']*'|[^\s&;"'}}]+)""",
    re.IGNORECASE,
)
# The second alternative is a password with an unescaped slash; a number and a slash there is a port and a path.
_USERINFO = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.\-]*://)(?:[^\s/?#]*|[^\s/:@]+:(?!\d+/)\S*)@")


def redact_urls(text: str) -> str:
    """`text` with the user name and password of every URL replaced."""
    return _USERINFO.sub(rf"\g<scheme>{REDACTED}@", text)


def redact(text: str) -> str:
    """`text` without URL passwords and without the values assigned (`=` or `:`) to names that look like secrets."""

    def hide(match: re.Match[str]) -> str:
        if match["name"] in _HARMLESS:
            return match[0]
        return f"{match['name']}{match['equals']}{REDACTED}"

    return _ASSIGNMENT.sub(hide, redact_urls(text))


def redact_command(command: Sequence[str]) -> list[str]:
    """The arguments of a command without secrets: `*token*=value`, `--api-key value`, passwords in URLs."""
    result: list[str] = []
    hide_next = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        secret = _SECRET.search(name) is not None and name not in _HARMLESS and not any(c.isspace() for c in name)
        if hide_next and not argument.startswith("-"):
            result.append(REDACTED)
        elif equals and secret and "://" not in name:
            result.append(f"{name}={REDACTED}")
        else:
            result.append(redact(argument))
        hide_next = secret and not equals and argument.startswith("-")
    return result


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = sorted(name for name in environ if _ALLOWED.fullmatch(name))
    return {name: REDACTED if _SECRET.search(name) else redact(environ[name]) for name in names}


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str | None]:
    """The versions of Python and of the packages that a run needs. None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None  # jaxdist itself when it runs from a checkout
    return found


def _git() -> dict[str, Any] | None:
    """The revision of the checkout that tracks this file; None without git, or for an installed package."""
    folder = Path(__file__).resolve().parent

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, env=environ)

    try:
        if ask("ls-files", "--error-unmatch", Path(__file__).name).returncode != 0:
            return None
        revision = ask("rev-parse", "HEAD")
        if revision.returncode != 0:
            return None
        return {"revision": revision.stdout.strip(), "modified": ask("diff-index", "--quiet", "HEAD").returncode != 0}
    except (OSError, subprocess.TimeoutExpired):
        return None


def measured_on() -> dict[str, str]:
    """The conditions to record with a measurement: date, command, versions, processor."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "command": " ".join([Path(sys.argv[0]).name, *redact_command(sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "jax": importlib.metadata.version("jax"),
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} x {(names or [platform.machine()])[0]}",
    }


def environment(
    *,
    process_count: int,
    devices: Sequence[str],
    mesh: Mapping[str, int],
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of env.json.

    devices: the kinds of all devices of the run ("NVIDIA H200", "cpu"), one string a device
    mesh: the sizes of its axes
    command: the arguments as started (sys.argv)
    environ: stands in for os.environ
    """
    return {
        "time_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": redact_command(command),
        "versions": versions(),
        "git": _git(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "cpu_count": os.cpu_count(),
        "process_count": process_count,
        "devices": dict(Counter(devices)),
        "mesh": dict(mesh),
        "variables": _variables(os.environ if environ is None else environ),
    }


def write_environment(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write the values of `environment` as indented JSON, atomically."""
    replace_file(path, (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())
