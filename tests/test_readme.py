"""What README and the pages of docs show of outputs and say of the code is true today."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from syntax import ROOT

from jaxdist.cli.work import explain
from jaxdist.config.load import load_config
from jaxdist.train_step import TrainStep
from jaxdist.trainer.train import train

BLOCKS = [
    found
    for page in ("README.md", "docs/explain.md")
    for found in re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]
PAGES = (ROOT / "docs").glob("*.md")
ELSEWHERE = {"docs/effort_levels.md"}  # a page of XLA's


def block(start: str) -> str:
    (found,) = (text for text in BLOCKS if text.startswith(start))
    return found


def test_the_header_of_the_quickstart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what is this Python's: the text, its hash and yardsticks."""
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "0", "1", "+", ":"], 20_000)
    (tmp_path / "text.py").write_text(" ".join(words))
    monkeypatch.setattr(TrainStep, "__call__", lambda *_: 1 / 0)  # the header is all
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["data.path=text.py", "observe.report=false"])
    with pytest.raises(ZeroDivisionError):
        train(config, Path(re.search(r"runs/quickstart-\S+", block("run  "))[0]))

    def plain(text: str) -> list[str]:
        text = re.sub(r"(?m)^(data       text: ).*", r"\1", text)
        text = re.sub(r"(?m)^(to beat    )bigram [\d.]+, trigram [\d.]+", r"\1", text)
        return [line for line in text.splitlines() if not line.startswith("cache ")]

    printed, shown = plain(capsys.readouterr().out), plain(block("run  "))
    assert len(printed) == 8 and printed == shown[:8]
    with pytest.raises(ZeroDivisionError):
        train(replace(config, memory=replace(config.memory, remat="full")), tmp_path / "remat")
    assert (
        "parallel   zero3, accumulate, 1 microbatch, native reductions, fp32, remat full\n" in capsys.readouterr().out
    )


def test_a_mistake_is_answered() -> None:
    command, shown = block("$ python scripts/train.py").split("\n", 1)
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    words = command.removeprefix("$ python ").split()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", shown)


def test_the_ledger_of_1024_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the line number: where this fails, put what the command prints into docs/explain.md."""
    monkeypatch.chdir(ROOT)
    command, shown = block("$ python scripts/explain.py").split("\n", 1)
    assert command == "$ python scripts/explain.py --config configs/llama_8b_fsdp.yaml --rows 3"
    nothing = dict.fromkeys(("timeline", "json", "plot", "write_budget", "budget"))
    options = Namespace(
        compile=False,
        remedies=False,
        gpu="h200",
        parameters=False,
        activations=False,
        devices_per_host=8,
        rows=3,
        **nothing,
    )
    assert explain.run_explain(load_config("configs/llama_8b_fsdp.yaml", planned=True), options) == []
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *sorted(path.name for path in PAGES)])
def test_paths_in_pages_are_there(page: str) -> None:
    """Those in backticks; the targets of links are tried in tests/docs/test_pages.py."""
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:jaxdist|scripts|docs|tests|configs|\.ci)/[\w./-]*\w)`", text))
    missing = [name for name in sorted(named - ELSEWHERE) if not (ROOT / name).exists()]
    assert not missing


def test_the_architecture_is_that_of_the_code() -> None:
    """Files in backticks are there, and define what stands before them: `name` (`file.py`), `name` in `file.py`."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

    def source(name: str) -> str:
        found = [path for path in (ROOT / name, ROOT / "jaxdist" / name) if path.is_file()]
        assert found, f"{name} is not there"
        return found[0].read_text(encoding="utf-8")

    named = re.findall(r"`([\w./]+\.py)`", text)
    pairs = re.findall(r"`([\w.]+)`\s+(?:\(|in )`([\w./]+\.py)`", text)
    assert len(named) > 30 and len(pairs) > 20
    for name in named:
        source(name)
    for names, file in pairs:
        for name in names.split("."):
            assert re.search(rf"(?:def|class) {name}\b|^ *{name}\b.*=", source(file), re.MULTILINE), (name, file)
