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

from jaxdist.cli import explain
from jaxdist.config.load import load_config
from jaxdist.trainer.train import train

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
HELD = {  # what a block begins with, and the test of it
    "python3 -m venv .venv": "tests/test_packaging.py, and .ci/run runs them",
    "run        runs/quickstart-": "test_the_header_of_the_quickstart",
    "python scripts/": "test_commands_are_understood",
    "$ python scripts/train.py": "test_a_mistake_is_answered",
    "MASTER_ADDR=": "test_commands_are_understood",
    '"""Your own Flax NNX model': "tests/parallel/test_user_loss.py",
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
    """But for what is this machine's and this Python's: the text, its hash and yardsticks, losses and times."""
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "0", "1", "+", ":"], 20_000)
    (tmp_path / "text.py").write_text(" ".join(words))
    small = (
        "data.path=text.py",
        "train.steps=1",
        "train.eval_every=0",
        "train.sample_tokens=0",
        "observe.report=false",
    )
    assert train(load_config(ROOT / "configs" / "quickstart.yaml", small), Path("runs/quickstart-20261122-234137")) == 0

    def plain(text: str) -> list[str]:
        text = re.sub(r"(?m)^(data       text: ).*", r"\1", text)
        text = re.sub(r"(?m)^(to beat    )bigram [\d.]+, trigram [\d.]+", r"\1", text)
        text = re.sub(r"(?m)^(step +1/)\d+  loss \S+  grad \S+  tokens/s \S+  eta \S+$", r"\1", text)
        return [line for line in text.splitlines() if not line.startswith("cache ")]

    printed, shown = plain(capsys.readouterr().out), plain(block("run  "))
    assert len(shown) > 9 and printed[:9] == shown[:9]
    assert printed[-1] == shown[-1]  # where the run is


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
            load_config(ROOT / own[own.index("--config") + 1], overrides)
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
    assert explain.run(load_config("configs/llama_8b_fsdp.yaml", planned=True), options) == []
    assert capsys.readouterr().out == shown
