"""Attack the commands, and classify how each attack ends: python scripts/bench/attacks.py [--only FAMILY] [--json OUT]

An attack is a malformed configuration, a damaged data file, a hostile Hugging Face folder, a fault in a run directory
or a damaged checkpoint. The commands are those that users type. An attack may end in

- refused: status 2, one line on stderr, and nothing outside the attacked folder has changed;
- stopped: status 75, or 1 with one last line, as `verify` and a run that cannot go on have it;
- done: status 0, and where a run went on, the losses of the run that was left alone, to the bit.

All else is a fault: a traceback, more than one line for a refusal, more than two minutes, a change outside, other
losses. Exit status 1 if there is one.
"""

import collections
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.config.schema import Config
from jaxdist.errors import CommandParser, reports_mistakes

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
YAML = """
model: {layers: 1, width: 8, heads: 1, dropout: 0.1}
data: {path: TEXT, seq_len: 8, global_batch: 4}
train: {steps: 4, eval_every: 0, sample_tokens: 4}
optimizer: {schedule: constant}  # so that a run of two steps begins as one of four does
checkpoint: {every: 1, keep: 2}
devices: {platform: cpu}
observe: {console: plain}
"""
VALUES = ("{a: {b: [1]}}", "[[]]", "-1", "1e400", "nope", "!!python/object/apply:os.system [id]")
JSON_VALUES: tuple[Any, ...] = (None, "text", -1, 1e400, [], {}, [[1]], True, 2**70, "\ud800", 10**400)
DEEP = b"[" * 100_000
Spoiled = tuple[str, str, bytes | None]  # a file; what is wrong with it; its new content, None for one of `KINDS`


class Attack(NamedTuple):
    """A command, and what must hold afterwards. home: the folder that it may change."""

    family: str
    name: str
    command: tuple[str, ...]
    home: Path
    run: Path | None = None  # a run directory whose losses must be those of the run that was left alone


class Outcome(NamedTuple):
    """How an attack ended. how: refused, stopped, done, or the name of a fault."""

    family: str
    name: str
    how: str
    status: int | None
    seconds: float
    told: str


def python(script: str, *words: object) -> tuple[str, ...]:
    """The command line of one of the scripts."""
    return (sys.executable, str(ROOT / "scripts" / script), *map(str, words))


def leaves(kind: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a configuration."""
    for each in fields(kind):
        inner = get_type_hints(kind)[each.name]
        if is_dataclass(inner):
            yield from leaves(inner, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}"


def malformed(home: Path) -> Iterator[Attack]:
    """Each key of the configuration with a value of a wrong kind, in turn."""
    for i, key in enumerate(leaves(Config)):
        for value in (VALUES[i % len(VALUES)], VALUES[(i + 2) % len(VALUES)]):
            words = ("--config", home / "run.yaml", "--run-dir", home / f"run{i}-{VALUES.index(value)}")
            yield Attack("configuration", f"{key}={value}", python("train.py", *words, f"{key}={value}"), home)


def edits(content: Any) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of a JSON object with each field missing or of a wrong type, and of what is no object."""
    for name in content:
        yield f"without {name}", json.dumps({key: value for key, value in content.items() if key != name}).encode()
        for value in JSON_VALUES:
            yield f"{name}: {str(value)[:12]!r}", json.dumps({**content, name: value}).encode("utf-8", "replace")
    for text in (b"", b"null", b"[]", b"\xff\xfe", DEEP, b'{"a": ' * 50_000, b"{" + b'"a": 1, ' * 9 + b'"a": 2}'):
        yield f"{text[:8]!r} for an object", text


def plant(path: Path, kind: str, outside: Path) -> None:
    """Put something else in the place of a file."""
    old = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    made: dict[str, Callable[[], Any]] = {
        "missing": lambda: None,
        "empty": lambda: path.write_bytes(b""),
        "cut": lambda: path.write_bytes(old[: len(old) // 2]),
        "flipped": lambda: path.write_bytes(bytes([*old[:-9], *(byte ^ 4 for byte in old[-9:])])),
        "deep": lambda: path.write_bytes(DEEP),
        "a folder": lambda: path.mkdir(),
        "a pipe": lambda: os.mkfifo(path),
        "a link": lambda: path.symlink_to(outside / "victim"),
        "a hard link": lambda: path.hardlink_to(outside / "victim"),
        "read-only": lambda: path.write_bytes(old),
    }
    made[kind]()
    if kind == "read-only":
        path.chmod(0o444)


KINDS = ("missing", "empty", "cut", "flipped", "deep", "a folder", "a pipe", "a link", "a hard link", "read-only")


def spoiled(home: Path, made: Path, name: str, cases: Iterable[Spoiled]) -> Iterator[tuple[int, str, Path]]:
    """(number, what is wrong, folder) of copies of a folder in each of which one file is spoiled.

    cases: (file, its new content); or (file, one of `KINDS`, None)
    """
    for i, (file, kind, text) in enumerate(cases):
        folder = shutil.copytree(made, home / f"{name}{i}")
        if text is None:
            plant(folder / file, kind, home.parent / "outside")
        else:
            (folder / file).write_bytes(text)
        yield i, f"{file}: {kind}", folder


def data_files(home: Path, made: Path) -> Iterator[Attack]:
    """Token files and their manifest. made: a folder of prepared data."""
    manifest = json.loads((made / "manifest.json").read_bytes())
    cases: list[Spoiled] = [("manifest.json", name, text) for name, text in edits(manifest)]
    cases += [(file, kind, None) for file in ("manifest.json", "train.bin") for kind in KINDS]
    for i, what, folder in spoiled(home, made, "data", cases):
        words = ("--config", home / "run.yaml", "--run-dir", home / f"run-data{i}", "data.source=tokens")
        command = python("train.py", *words, f"data.path={folder}", "model.vocab=256", "train.steps=1")
        yield Attack("data", what, command, home)


def folders_of_others(home: Path, made: Path) -> Iterator[Attack]:
    """Hugging Face folders. made: an exported model."""
    config = json.loads((made / "config.json").read_bytes())
    kept = {key: config[key] for key in ("model_type", "n_embd", "n_head", "n_layer", "vocab_size") if key in config}
    cases: list[Spoiled] = [("config.json", name, text) for name, text in edits(kept)]
    cases += [(file, kind, None) for file in ("config.json", "model.safetensors") for kind in KINDS]
    for i, what, folder in spoiled(home, made, "hf", cases):
        words = ("import", folder, "--config", home / "run.yaml", "--run-dir", home / f"run-hf{i}")
        yield Attack("Hugging Face", what, python("checkpoint.py", *words), home)


def run_directories(home: Path, made: Path) -> Iterator[Attack]:
    """Faults of each file of a stopped run, which then goes on. made: the run directory, two steps of four done."""
    names = ("config.yaml", "env.json", "metrics.jsonl", "samples.txt", "report.html", "run.lock", "stacks/rank0.txt")
    step = made / "checkpoints" / "2"
    inside = sorted(path.relative_to(made) for path in step.rglob("*") if path.is_file())
    of_step: list[Spoiled] = [
        (str(name), kind, None) for name in inside[:: max(1, len(inside) // 9)] for kind in KINDS[:8]
    ]
    cases: list[Spoiled] = [(name, kind, None) for name in names for kind in KINDS]
    for _, what, run in spoiled(home, made, "run-fault", [*cases, *of_step]):
        command = python("train.py", "--config", home / "run.yaml", "--run-dir", run)
        yield Attack("run directory", what, command, home, run)
    for _, what, run in spoiled(
        home, made, "run-verified", of_step
    ):  # copies of their own: a run moves what is damaged
        yield Attack("checkpoint command", what, python("checkpoint.py", "verify", run), home)


def prepared(home: Path) -> list[Attack]:
    """All attacks, with the run, data and model that they attack."""
    home.mkdir()
    (home / "text.py").write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(400)))
    (home / "run.yaml").write_text(YAML.replace("TEXT", str(home / "text.py")))

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, env=environment())

    train = python("train.py", "--config", home / "run.yaml")
    run(*train, "--run-dir", str(home / "alone"))
    run(*train, "--run-dir", str(home / "half"), "train.steps=2")
    run(*python("checkpoint.py", "export", home / "alone", "--output", home / "hf"))
    run(*python("prepare_data.py", home / "text.py", "--out", home / "tokens", "--held-out", 0.2))
    return [
        *malformed(home),
        *data_files(home, home / "tokens"),
        *folders_of_others(home, home / "hf"),
        *run_directories(home, home / "half"),
    ]


def environment() -> dict[str, str]:
    """The variables of a command: none of a job, and a compiler that does little."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA", "SLURM", "OMPI"))}
    return clean | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def losses(run: Path) -> list[Any] | None:
    """Loss of every step, None if they cannot be read."""
    try:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    return [line.get("loss") for line in lines if "loss" in line]


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def judge(attack: Attack, alone: list[Any], outside: Path, before: dict[str, bytes]) -> Outcome:
    """Run an attack."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            attack.command, capture_output=True, timeout=LIMIT_S, env=environment(), stdin=subprocess.DEVNULL
        )
        status, out, err = done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired:
        status, out, err = None, "", ""
    lines = err.strip().splitlines()
    how = {0: "done", 1: "stopped", 2: "refused", 75: "stopped", None: "hang"}.get(status, f"status {status}")
    if "Traceback (most recent call last)" in out + err:
        how = "traceback"
    elif status == 2 and len(lines) != 1:
        how = "more than one line"
    elif content(outside) != before:
        how = "outside changed"
    elif status == 0 and attack.run is not None:
        # What was in a metrics file that is damaged is gone; the steps after it are not.
        found = losses(attack.run)
        if not found or found[-2:] != alone[-2:]:
            how = "other losses"
    return Outcome(attack.family, attack.name, how, status, time.monotonic() - began, (lines or [""])[-1][:300])


@reports_mistakes
def main() -> int:
    """Run all attacks, print a table, and return the exit status."""
    parser = CommandParser(description="Attack the commands, and classify how each attack ends.")
    parser.add_argument("--only", help="a family, such as 'data'")
    parser.add_argument("--every", type=COUNT, default=1, help="run only one of so many, drawn with a fixed seed")
    parser.add_argument("--jobs", type=COUNT, default=2, help="attacks at once")
    parser.add_argument("--json", type=output_file, help="a file for the outcomes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder) / "outside"
        outside.mkdir()
        (outside / "victim").write_text("kept\n")
        attacks, before = prepared(Path(folder) / "home"), content(outside)
        attacks = [each for each in attacks if arguments.only in (None, each.family)]
        attacks = random.Random(0).sample(attacks, len(attacks) // arguments.every)
        alone = losses(Path(folder) / "home" / "alone") or []
        found: list[Outcome] = []
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for one in pool.map(lambda each: judge(each, alone, outside, before), attacks):
                found.append(one)
                bad = one.how not in ("refused", "stopped", "done")
                if bad or len(found) % 20 == 0:
                    print(f"{len(found)}/{len(attacks)} {f'FAULT {one}' if bad else ''}", flush=True)
    return report(found, arguments.json)


def report(found: list[Outcome], file: Path | None) -> int:
    """Print how the attacks ended, by family, and write them. Returns 1 if there was a fault."""
    counts = collections.Counter((each.family, each.how) for each in found)
    for (family, how), count in sorted(counts.items()):
        print(f"{family:20} {how:20} {count:5}")
    faults = [each for each in found if each.how not in ("refused", "stopped", "done")]
    longest = max((each.seconds for each in found), default=0.0)
    print(f"{len(found)} attacks, {len(faults)} faults; the longest took {longest:.1f} s")
    if file is not None:
        rows = {f"{family}: {how}": count for (family, how), count in sorted(counts.items())}
        said = {"attacks": len(found), "outcomes": rows, "faults": [each._asdict() for each in faults]}
        said |= {"longest_s": round(longest, 1), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
        file.write_text(json.dumps(said | {"command": "python scripts/bench/attacks.py"}, indent=1) + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
