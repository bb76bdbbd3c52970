"""What it costs to start from a Hugging Face folder: python scripts/bench/load.py [--gb 8] [--processes 2] [--json OUT]

Makes a folder of a Llama with random numbers in float32, in a temporary place. Processes of one job then load it with
fsdp=8, each the parts of its own devices. Given for each process: its parameters, and the most memory that it used
above them and above what it had before; apart from that, pages of the files that are mapped, which the system may take
back at any time. Beside it the time in which `safetensors` alone reads all tensors, in one process. The system has what
it can of the files in memory by then. Exit status 1 where a process needed more than a quarter of the folder.
"""

import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint.huggingface.convert import config_json
from jaxdist.checkpoint.huggingface.family import CONFIG
from jaxdist.checkpoint.huggingface.names import tensors
from jaxdist.checkpoint.huggingface.safetensors import TensorEntry, write
from jaxdist.config.arguments import numeric, output_file
from jaxdist.config.schema import Config, DevicesConfig, MeshConfig, ModelConfig
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.launcher.spawn import spawn
from jaxdist.observe import measured_on
from jaxdist.specs import STACKED

DEVICES, LIMIT = 8, 0.25  # LIMIT: memory above the parameters, in folders
LENGTH = 128
PAUSE_S = 0.005  # between two looks at the memory


def sized(gigabytes: float) -> ModelConfig:
    """A Llama whose parameters in float32 have about this size. Its width grows with it, its depth to 24."""
    width = max(64, 64 * round(math.sqrt(gigabytes * 1e9 / 4 / 24 / 16) / 64))
    model = ModelConfig(style="llama", width=width, heads=width // 64, vocab=32768, mlp_width=4 * width, layers=1)
    per_block = 16 * width**2
    rest = 2 * 32768 * width
    return model.replace(layers=max(1, round((gigabytes * 1e9 / 4 - rest) / per_block))).resolved()


def make_folder(folder: Path, model: ModelConfig) -> int:
    """Write the files of a model with random numbers. Returns their bytes."""
    numbers = np.random.default_rng(0)
    blocks = range(model.layers)
    entries = [
        TensorEntry(each.name.format(block), "float32", each.shape)
        for each in tensors(model, positions=LENGTH)
        for block in (blocks if each.leaf.startswith(f"{STACKED}.") else blocks[:1])
    ]
    write(folder, entries, (numbers.standard_normal(entry.shape, np.float32) for entry in entries))
    (folder / CONFIG).write_text(json.dumps(config_json(model, positions=LENGTH, dtype="float32")))
    return sum(entry.nbytes for entry in entries)


def memory() -> dict[str, int]:
    """Bytes of this process that are in memory: its own ("anon"), and pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return {"anon": found["RssAnon"] + found["RssShmem"], "file": found["RssFile"]}


@contextmanager
def peaks() -> Iterator[dict[str, int]]:
    """The most memory inside the context, filled in when it ends."""
    most, ended = memory(), threading.Event()

    def look() -> None:
        while not ended.wait(PAUSE_S):
            for name, size in memory().items():
                most[name] = max(most[name], size)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def load_here(rank: int, processes: int, folder: str, said: str) -> None:
    """Load the folder in a process of the job, and write what it took."""
    import jax
    import optax

    from jaxdist.init import state_target
    from jaxdist.mesh import make_mesh
    from jaxdist.models.gpt import gpt
    from jaxdist.pretrained import open_pretrained
    from jaxdist.runtime.start import start

    simulated = DevicesConfig(platform="cpu", simulated=DEVICES // processes)
    start(Config(devices=simulated, mesh=MeshConfig(fsdp=DEVICES)))
    mesh = make_mesh(fsdp=DEVICES)
    with open_pretrained(folder, key="--folder") as found:
        assert found.model is not None
        model = gpt(found.model, max_length=LENGTH)
    target = state_target(model, optax.sgd(0.1), mesh, strategy="zero3").params
    before = memory()
    with peaks() as most:
        begun = time.perf_counter()
        with open_pretrained(folder, key="--folder") as found:
            params = found.load(target, say=lambda line: None)
        jax.block_until_ready(params)
        seconds = time.perf_counter() - begun
    own = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    result = {
        "rank": rank,
        "seconds": seconds,
        "parameters_bytes": own,
        "above_bytes": most["anon"] - before["anon"] - own,
        "mapped_bytes": most["file"] - before["file"],
    }
    (Path(said) / f"{rank}.json").write_text(json.dumps(result))


def read_alone(rank: int, folder: str, said: str) -> None:
    """Read every tensor with `safetensors`, one at a time, and write the seconds."""
    from safetensors import safe_open

    begun = time.perf_counter()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):
                file.get_tensor(name)
    (Path(said) / "alone.json").write_text(json.dumps(time.perf_counter() - begun))


def measure(model: ModelConfig, scratch: Path, processes: int) -> dict[str, Any]:
    """The whole result."""
    folder, said = scratch / "model", scratch / "said"
    folder.mkdir()
    said.mkdir()
    size = make_folder(folder, model)
    print(f"made {size / 1e9:.2f} GB: {model.layers} blocks of width {model.width}", file=sys.stderr, flush=True)
    spawn(read_alone, 1, args=(str(folder), str(said)))
    spawn(load_here, processes, args=(processes, str(folder), str(said)))
    rows = [json.loads((said / f"{rank}.json").read_text()) for rank in range(processes)]
    return {"folder_bytes": size, "safetensors_s": json.loads((said / "alone.json").read_text()), "processes": rows}


def table(found: dict[str, Any]) -> str:
    """As Markdown: a line a process."""
    folder = found["folder_bytes"]
    lines = [
        f"folder {folder / 1e9:.2f} GB on {DEVICES} devices;"
        f" safetensors alone reads it in {found['safetensors_s']:.1f} s",
        "",
        "| process | loaded in | its parameters | most memory above them | of the folder | mapped pages of files |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["processes"]:
        sizes = [f"{row[name] / 1e9:.2f} GB" for name in ("parameters_bytes", "above_bytes", "mapped_bytes")]
        share = f"{row['above_bytes'] / folder:.3f}"
        lines.append(f"| {row['rank']} | {row['seconds']:.1f} s | {sizes[0]} | {sizes[1]} | {share} | {sizes[2]} |")
    return "\n".join(lines)


@reports_mistakes
def main() -> int:
    """Exit status 0, 1 where a process needs more memory than the limit, 2 for wrong arguments."""
    parser = CommandParser(description="Memory and time of loading a Hugging Face folder into shards.")
    parser.add_argument("--gb", type=numeric(float, above=0), default=8, help="size of the folder")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2, 4, 8))
    parser.add_argument("--folder", type=Path, help="where to make it; default: the system's temporary folder")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    arguments = parser.parse_args()
    if not 0.3 <= arguments.gb <= 1000:
        raise UserError(f"--gb: {arguments.gb}; allowed: 0.3 to 1000")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        found = measure(sized(arguments.gb), Path(scratch), arguments.processes)
    print(table(found))
    if arguments.json:
        result = {**measured_on(), "limit": LIMIT, **found}
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["above_bytes"] <= LIMIT * found["folder_bytes"] for row in found["processes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
