"""`jaxdist report`: report.html of a run directory again, whatever state it is in, and of several."""

import json
import shutil
import subprocess
import sys

import child
import pytest
from reports import ENVIRONMENT, records

from jaxdist.cli.runs.report import main
from jaxdist.config.load import load_config, to_yaml

TINY = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "data.seq_len=16",
    "data.global_batch=8",
    "parallel.min_shard_bytes=0",
]


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [json.dumps(line) + "\n" for line in records(20, 10)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 21, "lo')  # killed while it wrote
    (folder / "env.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "config.yaml").write_text(to_yaml(load_config("configs/quickstart.yaml", TINY, planned=True)))
    return folder


@pytest.mark.slow
def test_report_of_a_killed_run_is_made_again(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text()
    assert "written:" in capsys.readouterr().out
    assert "7,664 parameters learned 10.9 MB of text" in text
    for part in ("optimizer state", "all_gather", "÷ fsdp", "twice the microbatches", "settings differ"):
        assert part in text, part
    assert "[&#x27;" not in text and "damaged" not in text  # a torn last line is no damage


def test_report_without_a_usable_configuration(run_dir):
    (run_dir / "config.yaml").write_text("model: {name: my_module.gone}\n")
    assert main([str(run_dir)]) == 0
    assert "config.yaml cannot be used: model.name" in (run_dir / "report.html").read_text()
    (run_dir / "config.yaml").unlink()
    assert main([str(run_dir), "--output", str(run_dir / "other.html")]) == 0
    assert "started from Python" in (run_dir / "other.html").read_text()


def test_runs_are_compared(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "other")
    changed = load_config("configs/quickstart.yaml", [*TINY, "parallel.strategy=zero2"], planned=True)
    (tmp_path / "other" / "config.yaml").write_text(to_yaml(changed))
    output = tmp_path / "both.html"
    assert main([str(run_dir), str(tmp_path / "other"), "--output", str(output), "--no-trace"]) == 0
    assert 'parallel.strategy</td><td data-head="mine">zero3</td><td data-head="other">zero2' in output.read_text()


def test_wrong_arguments_are_one_line(tmp_path, run_dir, capsys):
    assert main([str(tmp_path)]) == 2
    assert main([str(run_dir), "--remedies", "--no-trace"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "holds no metrics.jsonl" in errors[0] and "--no-trace" in errors[1]


@pytest.mark.slow
def test_remedies_are_compiled(run_dir):
    code = "import sys; from jaxdist.cli.runs.report import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(run_dir), "--remedies"]
    subprocess.run(command, check=True, env=child.environment() | child.QUICK, timeout=300)
    text = (run_dir / "report.html").read_text()
    assert "would free" in text and "compiled" in text and "FLOPs" in text
