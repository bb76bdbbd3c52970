"""How far a reader walks: frames and files from the manual region to a collective, and lines that a step loads."""

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import jaxdist
from jaxdist.build import assemble
from jaxdist.config.load import load_config
from jaxdist.mesh import abstract_mesh

PACKAGE = Path(jaxdist.__file__).parent
CONFIG = PACKAGE.parent / "configs" / "quickstart.yaml"
FRAMES, FILES = 12, 5  # at most, `region` included
LOADED_LINES = 5_923  # at most, of jaxdist's own, by `import jaxdist.step`
COUNT = """
import sys, jaxdist.step
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "jaxdist"]
print(sum(len(open(file).readlines()) for file in files))
"""


def frames_to_first_gather(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """file:function of each frame of the library from `region` to the first `lax.all_gather` of the quickstart."""
    stacks: list[list[str]] = []
    all_gather = lax.all_gather

    def watched(*arguments: Any, **options: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
        stacks.append([f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.name}" for frame in frames])
        return all_gather(*arguments, **options)

    monkeypatch.setattr(lax, "all_gather", watched)
    monkeypatch.setattr(jaxdist.step, "loss_seed", lambda *_: 1.0)  # it traces the loss too, and sends nothing
    config = load_config(CONFIG, ["parallel.prefetch=0"])
    parts = assemble(config, abstract_mesh(data=2, fsdp=2, tensor=2))
    rows = jax.ShapeDtypeStruct((config.data.global_batch, config.data.seq_len), np.int32)
    weights = jax.ShapeDtypeStruct(rows.shape, np.float32)
    parts.step.jitted(parts.target).trace(parts.target, {"inputs": rows, "targets": rows, "weights": weights})
    first = stacks[0]
    return first[first.index("step.py:gradients") + 1 :]


def test_the_first_gather_is_near_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = frames_to_first_gather(monkeypatch)
    files = {frame.partition(":")[0] for frame in frames}
    told = "\n".join(frames)
    assert len(frames) <= FRAMES, told
    assert len(files) <= FILES, told
    page = " ".join((PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    assert f"there are {len(frames)} frames in {len(files)} files" in page, told
    for file in files:
        names = ", ".join(f"`{frame.partition(':')[2]}`" for frame in frames if frame.startswith(f"{file}:"))
        assert f"| `jaxdist/{file}` | {names} |" in page, told


def test_a_step_loads_only_what_every_step_needs() -> None:
    """Layers, prefetching, pipelines, autocast and users' losses are imported by who uses them."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT],
        env={"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) <= LOADED_LINES
