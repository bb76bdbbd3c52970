"""The command `bench`: its figures are those of the plan, its mistakes are lines."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxdist.cli.runs.bench import main
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.plan.explain import explain
from jaxdist.trainer.measures.bench import Timing, check_variants, time_step, timing_table

CONFIG = """
model: {{layers: 1, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{fsdp: 8}}
parallel: {{strategy: zero2, min_shard_bytes: 0}}
devices: {{platform: cpu}}
"""


def configuration(folder: Path) -> Path:
    (folder / "text.py").write_text("def f(x): return x + 1\n" * 200)
    (folder / "run.yaml").write_text(CONFIG.format(path=folder / "text.py"))
    return folder / "run.yaml"


@pytest.mark.slow
def test_figures_of_a_step(tmp_path: Path) -> None:
    config = load_config(configuration(tmp_path))
    timing, planned = time_step("zero2", config, 3), explain(config)
    assert len(timing.seconds) == 3 and all(each > 0 for each in timing.seconds)
    assert (timing.per_step, timing.unit, timing.devices, timing.mfu) == (8 * 16, "tokens", 8, None)
    assert timing.sent_bytes == round(planned.ledger.wire_bytes) > 0
    assert timing.device_bytes is not None and timing.device_bytes > planned.memory["parameters"]


def test_the_table_compares_with_the_first() -> None:
    plain = Timing("plain", (0.2, 0.1, 0.3), 1000, "tokens", 5.0, None, 0, None, "cpu", 1)
    other = Timing("zero3", (0.1, 0.1, 0.4), 1000, "tokens", 5.0, 3 << 20, 1 << 20, 0.25, "cpu", 1)
    head, *rows = (line.split("  ") for line in timing_table([plain, other]))
    first, second = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    assert first == ["plain", "200.00", "120.00 to 280.00", "5,000", "1.00 x", "-", "-", "0.00", "5.0"]
    assert second == ["zero3", "100.00", "100.00 to 340.00", "10,000", "2.00 x", "25.0%", "3.0", "1.00", "5.0"]
    assert "tokens/s" in "  ".join(head)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps: 1; allowed: an integer >= 2"),
        (["--json", "no/such/folder/x.json"], "--json: 'no/such/folder/x.json': its folder does not exist"),
        (["--with", "devices.xla=plain"], "--with: 'devices.xla=plain' changes devices"),
        (["--with", "parallel.strategy=zero9"], "parallel.strategy: 'zero9'"),
    ],
)
def test_mistakes_are_lines(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(configuration(tmp_path)), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_local_sgd_is_not_timed_without_its_outer_steps(tmp_path: Path) -> None:
    given = ["mesh={data: 2, fsdp: 4}", "train.eval_every=0", "parallel.local.every=9"]
    with pytest.raises(
        UserError, match=r"^parallel\.local\.every: 9, but a step is timed without outer steps here; set"
    ):
        check_variants([load_config(configuration(tmp_path), given)])


def test_no_variant_is_timed_before_all_fit_the_devices(tmp_path: Path) -> None:
    config = load_config(configuration(tmp_path))
    with pytest.raises(UserError, match=r"^mesh: data=64 .*needs \d+ devices; 8 are there"):
        check_variants([config, replace(config, mesh=replace(config.mesh, data=64))])
