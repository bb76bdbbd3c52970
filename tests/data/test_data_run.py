"""Data in a whole run: prepared files with packed documents, time waited for batches, what may change on resuming."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import folder_of
from pages import on_page

from jaxdist.config.load import load_config
from jaxdist.data import Loader
from jaxdist.data.prepare import prepare
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.trainer.measures.clock import Clock
from jaxdist.trainer.summary import data_wait
from jaxdist.trainer.train import train

YAML = """
model: {layers: 1, width: 16, heads: 2}
data: {source: tokens, path: %s, packing: documents, prefetch: 1, seq_len: 16, global_batch: 4}
mesh: {data: 1}
train: {steps: 6, eval_every: 6, eval_batches: 1, sample_tokens: 0}
devices: {platform: cpu}
observe: {console: plain, report: false}
"""


@pytest.mark.slow
def test_a_run_on_prepared_documents_that_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {f"{i}.txt": b"abcdefgh"[i % 8 :] * (1 + i % 5) for i in range(200)}
    prepare([folder_of(tmp_path / "texts", texts)], tmp_path / "ids", held_out=0.2)
    (tmp_path / "tiny.yaml").write_text(YAML % (tmp_path / "ids"))
    batch, weights = Loader.batch, []

    def slow(self: Loader, step: int) -> Any:
        made = batch(self, step)
        weights.append(float(np.asarray(made["weights"]).sum()))
        time.sleep(0.15)
        return made

    monkeypatch.setattr(Loader, "batch", slow)
    assert train(load_config(tmp_path / "tiny.yaml"), tmp_path / "run") == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["weight"] for record in records] == weights[:6]
    assert 0 < max(weights) < 4 * 16  # documents are shorter than two windows
    assert all(0 <= record["data_wait"] <= 1 for record in records)
    assert all(record["data_wait"] > 0.5 for record in records[2:5])  # the others: compiling, and no batch after it
    assert 0.3 < data_wait(records) < 1
    printed = capsys.readouterr().out
    [waited] = [line for line in printed.splitlines() if line.startswith("waited for data")]
    assert f"data {data_wait(records):.0%} of" in waited
    on_page("docs/data.md", waited, {r"\d+%": "94%"})
    assert "bits per byte" in printed  # as the manifest says
    with pytest.raises(UserError, match=r"^data\.packing: 'none', but the run in .* was started with 'documents'"):
        train(load_config(tmp_path / "tiny.yaml", ["data.packing=none"]), tmp_path / "run")
    assert (
        train(load_config(tmp_path / "tiny.yaml", ["data.prefetch=3", "data.token_dtype=uint8"]), tmp_path / "run") == 0
    )
    with pytest.raises(UserError, match=r"^data\.packing: 'documents' needs .* source text gives none"):
        train(load_config(tmp_path / "tiny.yaml", ["data.source=text"]), tmp_path / "other")
    assert json.loads((tmp_path / "run" / "env.json").read_text())["data"]["unit"] == "bytes"


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def batches() -> Any:
        for seconds in (1.0, 2.0, 5.0, 0.0):
            now[0] += seconds
            yield seconds

    clock = Clock(100)
    awaited = clock.awaited(batches())
    assert next(awaited) == 1.0
    now[0] += 1.0
    assert next(awaited) == 2.0
    now[0] += 1.0
    assert clock.finished() == {"tokens_per_s": 20.0, "data_wait": 0.6, "step_s": 5.0}  # 3 s of them for batches
    assert set(clock.line()) == {"time", "time/start"}
    now[0] += 4.0
    with clock.spending("eval"):
        now[0] += 7.0
    assert clock.finished() == {"tokens_per_s": 25.0, "data_wait": 0.0, "step_s": 4.0}
    now[0] += 0.5
    line = clock.line()
    del line["time"]
    wanted = {"device": 0.0, "data": 0.0, "eval": 7.0, "save": 0.0, "host": 4.5}
    assert line == {f"time/{name}": seconds for name, seconds in wanted.items()}
    assert next(awaited) == 5.0
    clock.restart()
    assert list(awaited) == [0.0]
    now[0] += 1.0
    assert clock.finished() == {"tokens_per_s": 100.0, "data_wait": 0.0, "step_s": 1.0}
    clock = Clock(8, "samples")
    now[0] += 2.0
    assert clock.finished() == {"samples_per_s": 4.0, "data_wait": 0.0, "step_s": 2.0}


def test_data_wait_of_a_run_weighs_steps_by_their_time() -> None:
    records = [{"tokens_per_s": rate, "data_wait": wait} for rate, wait in ((1, 1.0), (10, 0.5), (30, 0.1))]
    assert data_wait(records) == pytest.approx((0.5 / 10 + 0.1 / 30) / (1 / 10 + 1 / 30))
    assert data_wait([{"samples_per_s": 1.0, "data_wait": wait} for wait in (1.0, 0.5, 0.1)]) == pytest.approx(0.3)
    assert data_wait(records[:1]) == data_wait([]) == data_wait([{"tokens_per_s": 1.0}] * 3) == 0
