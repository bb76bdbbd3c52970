"""A job of two ranks, one of which hangs in its data: it is named, with its stack: python docs/examples/hung_rank.py"""

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np


class Numbers:
    """A data source whose sample 200 never comes on rank 1."""

    vocab = 256

    def __iter__(self):
        for i in itertools.count():
            if i == 200 and jax.process_index() == 1:
                time.sleep(3600)
            yield np.arange(i, i + 17) % 256


SETTINGS = """
model.layers=1 model.width=16 model.heads=2 data.source=iterable data.path=hung_rank.Numbers data.buffer=8
data.seq_len=16 data.global_batch=8 mesh.data=2 mesh.fsdp=1 mesh.tensor=1 devices.simulated=1
train.watchdog_s=5 train.eval_every=0 train.sample_tokens=0
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as run:
        jaxdist = [sys.executable, "-m", "jaxdist.cli.main"]
        train = [*jaxdist, "train", "quickstart", *SETTINGS.split(), "--run-dir", run]
        job = [*jaxdist, "launch", "-n", "2", "--max-restarts", "0", "--", *train]
        subprocess.run(job, cwd=Path(__file__).parent)
        stacks = (Path(run) / "stacks" / "rank1.txt").read_text().splitlines()
        print("of the stacks of rank 1:", *[line for line in stacks if Path(__file__).name in line])
