"""What a run leaves behind after its last step: a sample of text, the report, a word on how it went."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.config.load import to_yaml
from jaxdist.mesh import batch_shards, sizes_of
from jaxdist.observe import LayoutRow, read_metrics, work_unit, write_report
from jaxdist.specs import bytes_per_device, path_name, shard_count
from jaxdist.trainer.forward import make_sampler
from jaxdist.trainer.recorder import work_of_a_step
from jaxdist.trainer.run import Run, forward_parts, run_environment

WAIT_LIMIT = 0.05  # of a run's time; waiting longer for data is said at the end


def sample_text(run: Run) -> str:
    """Text that the model writes after the prompt, one sample a batch shard. Needs a source of bytes."""
    config, rows, length = run.config, batch_shards(run.mesh), run.config.data.seq_len
    prompt = np.frombuffer(config.train.sample_prompt.encode()[: length - 1] or b"\n", np.uint8)
    stop = min(length, len(prompt) + config.train.sample_tokens)
    tokens = np.zeros((rows, length), np.int32)
    tokens[:, : len(prompt)] = prompt
    sampler = make_sampler(*forward_parts(run))
    global_tokens = jax.make_array_from_callback(tokens.shape, run.sharding, lambda index: tokens[index])
    drawn = sampler(run.state.params, global_tokens, len(prompt), stop, jax.random.key(config.train.seed))
    whole = multihost_utils.process_allgather(drawn, tiled=True)
    return "\n\n".join(bytes(row[:stop].astype(np.uint8)).decode("utf-8", "replace") for row in np.asarray(whole))


def layout_rows(run: Run) -> list[LayoutRow]:
    """The sharding table of the parameters."""
    return [
        LayoutRow(
            path_name(path),
            leaf.shape,
            str(leaf.dtype),
            str(leaf.sharding.spec),
            shard_count(leaf.sharding.spec, run.mesh),
            bytes_per_device(leaf, leaf.sharding.spec, run.mesh),
            math.prod(leaf.shape) * leaf.dtype.itemsize,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(run.target.params)
    ]


def report(run: Run, samples: str) -> None:
    """Write report.html from the run directory."""
    config, (work, unit) = run.config, work_of_a_step(run.config, run.source)
    write_report(
        run.folder / "report.html",
        title=run.folder.name,
        config_yaml=to_yaml(config),
        environment=run_environment(run.mesh),
        metrics=read_metrics(run.folder / "metrics.jsonl"),
        layout=layout_rows(run),
        mesh_axes=sizes_of(run.mesh),
        devices=[device.device_kind for device in run.mesh.devices.flat],
        baselines=run.baselines,
        samples=samples,
        data_info={**run.source.info, f"{unit}_per_step": work},
    )


def data_wait(records: Sequence[Mapping[str, Any]]) -> float:
    """The fraction of a run's time that it waited for data, by the records of metrics.jsonl but the first, in whose
    step the program is compiled."""
    timed, rate = [record for record in records[1:] if "data_wait" in record], f"{work_unit(records)}_per_s"
    seconds = [1 / record[rate] for record in timed]  # times the tokens, or samples, of a step
    waited = sum(record["data_wait"] * each for record, each in zip(timed, seconds, strict=True))
    return waited / sum(seconds) if timed else 0.0


def finish(run: Run, samples: str) -> None:
    """After the last step: what the run directory and the reader get. Process 0 only."""
    if samples:
        (run.folder / "samples.txt").write_text(samples + "\n", encoding="utf-8")
        run.console.line("sample\n" + "\n".join("  | " + line for line in samples.split("\n\n")[0].splitlines()[:12]))
    if run.config.observe.report:
        report(run, samples)
    records = read_metrics(run.folder / "metrics.jsonl")
    evaluations = [record for record in records if "eval/bits_per_byte" in record]
    if evaluations:
        bits = evaluations[-1]["eval/bits_per_byte"]
        marks = [
            f"{'below' if bits < mark else 'NOT below'} the {name} model's {mark:.3f}"
            for name, mark in run.baselines.items()
        ]
        run.console.line(", ".join([f"held-out text: {bits:.3f} bits per byte", *marks]))
    waited = data_wait(records)
    if waited > WAIT_LIMIT:
        run.console.line(f"waited for data {waited:.0%} of the time: docs/data.md says what helps")
    run.console.line(f"run directory: {run.folder}")
