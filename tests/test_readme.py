"""Every block of README that shows a command, its output or a program is what is there today."""

import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from syntax import ROOT

from jaxdist.cli.work import explain
from jaxdist.config.load import load_config
from jaxdist.train_step import TrainStep
from jaxdist.trainer.train import train

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PAGES = (ROOT / "docs").glob("*.md")
ELSEWHERE = {"docs/effort_levels.md"}  # a page of XLA's
HELD = {  # what a block begins with, and the test of it
    "python3 -m venv .venv": "tests/test_packaging.py, and .ci/run runs them",
    "run        runs/quickstart-": "test_the_header_of_the_quickstart",
    "python scripts/": "test_commands_are_understood",
    "$ python scripts/train.py": "test_a_mistake_is_answered",
    "MASTER_ADDR=": "test_commands_are_understood",
    '"""Your own transformer of stock': "tests/nn/test_own_blocks.py",
    '"""Your own Flax NNX model': "tests/parallel/test_user_loss.py",
    "done = jaxdist.fit(": "tests/trainer/test_fit.py",
    "deterministic\n": "tests/contracts/test_deterministic.py",
    "$ python scripts/explain.py": "test_the_ledger_of_1024_devices",
    " batch = f(seed, step)": "a drawing",
    "jaxdist/\n": "tests/test_tree.py",
}


def block(start: str) -> str:
    (found,) = (text for text in BLOCKS if text.startswith(start))
    return found


def test_every_block_has_a_test() -> None:
    held = {text: [start for start in HELD if text.startswith(start)] for text in BLOCKS}
    assert all(len(starts) == 1 for starts in held.values()), [text[:60] for text in held if len(held[text]) != 1]
    assert {start for starts in held.values() for start in starts} == set(HELD)


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


def commands() -> list[str]:
    lines = [
        line for text in BLOCKS if text.startswith(("python scripts/", "MASTER_ADDR=")) for line in text.splitlines()
    ]
    return [line for line in lines if line]


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str, tmp_path: Path) -> None:
    """The script is there and takes the options; the configuration holds, on a machine that has text to train on."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    while words:
        assert words[0] == "python" and (ROOT / words[1]).is_file()
        own, _, rest = words, "", []
        if "--" in words:
            own, rest = words[: words.index("--")], words[words.index("--") + 1 :]
        if words[1] == "scripts/train.py":
            overrides = [word.replace("my/texts", str(ROOT / "docs")) for word in own if "=" in word]
            load_config(ROOT / own[own.index("--config") + 1], overrides, planned="mesh.data=-1" not in own)
        options = [word for word in own if word.startswith("-")]
        said = subprocess.run(
            [sys.executable, words[1], "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert all(re.search(rf"(?<![\w-]){option}\b", said) for option in options), said
        words = rest


def test_a_mistake_is_answered() -> None:
    command, shown = block("$ python scripts/train.py").split("\n", 1)
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    words = command.removeprefix("$ python ").split()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", shown)


def test_the_ledger_of_1024_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the line number: where this fails, put what the command prints into README."""
    monkeypatch.chdir(ROOT)
    command, shown = block("$ python scripts/explain.py").split("\n", 1)
    assert command == "$ python scripts/explain.py --config configs/llama_8b_fsdp.yaml --rows 3"
    nothing = dict.fromkeys(("timeline", "json", "plot", "write_budget", "budget"))
    options = Namespace(
        compile=False, remedies=False, parameters=False, activations=False, devices_per_host=8, rows=3, **nothing
    )
    assert explain.run_explain(load_config("configs/llama_8b_fsdp.yaml", planned=True), options) == []
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *sorted(path.name for path in PAGES)])
def test_paths_in_pages_are_there(page: str) -> None:
    """Those in backticks, and the targets of links."""
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:jaxdist|scripts|docs|tests|configs|\.ci)/[\w./-]*\w)`", text))
    linked = {path.parent / link for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)}
    missing = [name for name in sorted(named - ELSEWHERE) if not (ROOT / name).exists()]
    missing += [str(link) for link in sorted(linked) if not link.exists()]
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
