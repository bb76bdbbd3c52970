"""A classifier of Python lines (code, comment, docstring) from a BERT that was trained to predict masked bytes.

python scripts/train.py --config configs/bert_stdlib.yaml --run-dir runs/bert
python docs/examples/bert_lines.py --pretrained runs/bert
"""

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding

import jaxdist
from jaxdist.checkpoint.reader import open_steps
from jaxdist.config.schema import DataConfig, ModelConfig
from jaxdist.data import load_source, make_eval_loader, make_loader
from jaxdist.models.bert import bert
from jaxdist.specs import BATCH_SPEC, leaves_by_name


def with_encoder(model, stored):
    """The model, which starts with the saved parameters where its own have their names and shapes: all but the head."""
    saved = {name: leaf.shape for name, leaf in stored.params().items() if not name.startswith("head.")}
    own = {name: leaf.shape for name, leaf in leaves_by_name(model.shapes).items() if not name.startswith("head.")}
    assert saved == own, f"another encoder: {saved.items() ^ own.items()}"
    arrays = {name: stored.param(name) for name in saved}

    def init(key):
        new = leaves_by_name(model.init(key))
        return unflatten_dict({**new, **{name: jnp.asarray(each) for name, each in arrays.items()}}, sep=".")

    return model._replace(init=init)


def batches_of(loader, count):
    return [jax.tree.map(np.asarray, loader.batch(i)) for i in range(count)]


def train(model, batches, held_out, mesh, steps):
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(1, steps // 10), steps)
    with tempfile.TemporaryDirectory() as folder:
        done = jaxdist.fit(
            model,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01)),
            batches,
            steps=steps,
            mesh=mesh,
            strategy="zero3",
            run_dir=folder,
            eval_data=held_out,
            settings={"train.eval_every": steps, "checkpoint.every": 0, "observe.log_every": 50},
        )
    return done.metrics["eval/accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pretrained", required=True, type=Path, help="the run directory of a BERT with model.head=mlm"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32, help="lines of a batch")
    given = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 2)  # two simulated devices; ignored on GPUs
    (stored,) = open_steps(given.pretrained)
    mesh, length = jaxdist.make_mesh(fsdp=-1), stored.meta["data"]["seq_len"]
    options = ModelConfig(**{**stored.meta["model"], "head": "classification", "classes": 3})
    model = bert(options, max_length=length)
    source = load_source(DataConfig(source="lines", seq_len=length))
    sizes = {"seq_len": length, "sharding": NamedSharding(mesh, BATCH_SPEC)}
    batches = batches_of(make_loader(source, **sizes, global_batch=given.rows, seed=0), given.steps)
    loader = make_eval_loader(source, **sizes, global_batch=128, batches=16)
    held_out = batches_of(loader, loader.batches)

    found = source.yardstick.compute()
    found["from scratch"] = train(model, batches, held_out, mesh, given.steps)
    found["pre-trained"] = train(with_encoder(model, stored), batches, held_out, mesh, given.steps)
    print(f"accuracy on held-out lines, after {given.steps} steps of {given.rows} lines:")
    for name, accuracy in found.items():
        print(f"{name:>14} {accuracy:.3f}")
