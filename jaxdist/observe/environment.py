"""The environment of a run for env.json, without secrets: versions, devices, command, and a few variables.

Only variables on an allow-list are recorded. If their names look like secrets, the values are redacted. So are, in the
command and in the configuration, values assigned to such names, tokens of a known form, and passwords in URLs.
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
# What a secret looks like. Names, of which a part is one of these words; and those that are such a word, or have it
# between their separators (`sig`, but not `design`): signed URLs of Azure have `sig` and `sv`.
_WORDS = r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|SIGNATURE|AUTHORIZATION"
_WHOLE_WORDS = r"SIG|SV|AUTH"
_NAME = (
    rf"[\w.\-]*(?:{_WORDS})[\w.\-]*|(?:[\w.\-]*[.\-_])?(?<![A-Z0-9])(?:{_WHOLE_WORDS})(?![A-Z0-9])(?:[.\-_][\w.\-]*)?"
)
# Values that are one whatever their name is: by the prefixes that their makers give them, and what HTTP sends.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{8,}|gh[oprsu]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|[rs]k_live_\w{8,}"
    r"|sk-(?:proj|ant|or|svcacct|admin)-[\w-]{8,}|sk-\w{8,}(?![\w-])"  # but no name of several words, as in a path
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|xox[abeoprs]-[\w-]{8,}|AIza[\w-]{30,}|ya29\.[\w-]{8,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{30,}|dckr_pat_[\w-]{8,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"
    r"|(?i:bearer)\s+[\w.~+/=-]{8,})"
)
_SECRET = re.compile(_NAME, re.IGNORECASE)
# Keys of jaxdist's own configuration that hold one of the words and no secret; a record without them cannot be rerun.
_HARMLESS = frozenset({"train.sample_tokens", "data.token_dtype", "data.mask_token", "data.mask_token_rate"})
_ASSIGNMENT = re.compile(
    rf"""(?P<name>(?<![\w.\-])(?:{_NAME}))(?P<equals>["']?\s*[=:]\s*)"""
    r"""(?P<value>"[^"]*"|'[^']*'|(?:basic|bearer|digest|token)\s+[^\s&;"'}]+|[^\s&;"'}]+)""",
    re.IGNORECASE,
)
# The second alternative is a password with an unescaped slash; a number and a slash there is a port and a path.
_USERINFO = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.\-]*://)(?:[^\s/?#]*|[^\s/:@]+:(?!\d+/)\S*)@")


def redact_urls(text: str) -> str:
    """`text` with the user name and password of every URL replaced."""
    return _USERINFO.sub(rf"\g<scheme>{REDACTED}@", text)


def redact(text: str) -> str:
    """`text` without URL passwords, without the values assigned (`=` or `:`) to names that look like secrets, and
    without values that look like one themselves, such as the tokens of well-known services."""

    def hide(match: re.Match[str]) -> str:
        # "tokens: 2,503,730 tokens to train on" is what a header says of the source of this name.
        number = match["name"] == "tokens" and match["value"].replace(",", "").isdecimal()
        if match["name"] in _HARMLESS or number:
            return match[0]
        return f"{match['name']}{match['equals']}{REDACTED}"

    return _TOKEN.sub(REDACTED, _ASSIGNMENT.sub(hide, redact_urls(text)))


def _is_secret(name: str) -> bool:
    return _SECRET.fullmatch(name) is not None and name not in _HARMLESS


def redact_settings(settings: Any, name: str = "") -> Any:
    """A copy of a configuration, as nested dicts, without the secrets in its texts. name: the key that it belongs to,
    such as "data.path"."""
    if isinstance(settings, Mapping):
        return {key: redact_settings(value, f"{name}.{key}".lstrip(".")) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return type(settings)(redact_settings(value, name) for value in settings)
    if not isinstance(settings, str):
        return settings
    return REDACTED if settings and _is_secret(name) else redact(settings)


def redact_command(command: Sequence[str]) -> list[str]:
    """The arguments of a command without secrets: `*token*=value`, `--api-key value`, passwords in URLs."""
    result: list[str] = []
    hide_next = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        secret = _is_secret(name)
        if hide_next and not argument.startswith("-"):
            result.append(REDACTED)
        elif equals and secret:
            result.append(f"{name}={REDACTED}")
        else:
            result.append(redact(argument))
        hide_next = secret and not equals and argument.startswith("-")
    return result


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = sorted(name for name in environ if _ALLOWED.fullmatch(name))
    return {name: REDACTED if _is_secret(name) else redact(environ[name]) for name in names}


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


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{before}{key}"
        value = list(value) if isinstance(value, tuple) else value  # as YAML gives it back
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found
