"""Whether the files of a checkpoint are what was written."""

import hashlib
import json
from pathlib import Path


def verify(folder: Path) -> list[str]:
    """What is wrong with a step's folder, a line each; nothing if its files are those that `sha256.json` lists, or if
    there is no such file."""
    listed = folder / "sha256.json"
    if not listed.is_file():
        return []
    problems = []
    for name, wanted in json.loads(listed.read_text(encoding="utf-8")).items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            problems.append(f"{name}: is not what was written")
    return problems
