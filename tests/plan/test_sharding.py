"""Why a parameter is split, or is whole, in the table of `jaxdist explain --parameters`."""

import pytest

from jaxdist.config.load import load_config
from jaxdist.plan.explain import explain
from jaxdist.plan.report.text import explanation_text

PIPELINE = ("parallel.schedule=one_f_one_b", "parallel.microbatches=2")
SMALL = "below parallel.min_shard_bytes 32,768"


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        (
            (),
            {
                "embed.positions.table": "zero3",
                "embed.tokens.table": "layer and zero3",
                "blocks.mlp.up.bias": "layer",
                "head.norm.scale": SMALL,
            },
        ),
        (
            ("mesh={data: 1, fsdp: 3}", "data.global_batch=3", "parallel.min_shard_bytes=0"),
            {"embed.positions.table": "no dim divides", "blocks.mlp.up.kernel": "layer"},
        ),
        (("parallel.strategy=ddp", "mesh.tensor=1", "mesh.data=4"), {"embed.tokens.table": "ddp splits none"}),
        (("mesh={data: 1, fsdp: 1, tensor: 1}",), {"embed.tokens.table": ""}),
        (
            ("parallel.min_shard_bytes=1000000000",),
            {"embed.positions.table": "below parallel.min_shard_bytes 1,000,000,000", "embed.tokens.table": "layer"},
        ),
        (
            ("parallel.strategy=ddp", "mesh={pipe: 2, data: 4, fsdp: 1, tensor: 1}", *PIPELINE),
            {"embed.positions.table": "pipe", "blocks.mlp.up.kernel": "layer", "head.norm.scale": SMALL},
        ),
    ],
)
def test_each_parameter_has_its_reason(overrides: tuple[str, ...], reasons: dict[str, str]) -> None:
    small = ("model.layers=2", "data.global_batch=8", "mesh={data: 2, fsdp: 2, tensor: 2}")
    found = explain(load_config("configs/quickstart.yaml", [*small, *overrides], planned=True))
    whys = {row.path: row.why for row in found.parameters}
    assert {name: whys[name] for name in reasons} == reasons
    assert ("  why\n" in explanation_text(found, parameters=True)) == any(whys.values())
