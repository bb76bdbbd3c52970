"""The notes' table of choices, asked of the planner: five cases, each with its link and sizes, and pure layouts beside.

    python scripts/bench/plan_cases.py [--case 1 --case 2b ...] [--json OUT]

Closed forms and the makers' rates alone; nothing is measured or compiled, and no GPU is needed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.arguments import output_file
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.observe import measured_on
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.search.choose import Predicted, Search, search, tie_of
from jaxdist.plan.search.cluster import PlanCluster, gpu_cluster
from jaxdist.plan.search.reasons import does_not_fit
from jaxdist.plan.search.space import Layout, layouts
from jaxdist.precision.policy import precision_of

ROOT = Path(__file__).parents[2]
LLAMA = ("model.mlp_width=null", "memory.remat=none", "parallel.prefetch=null", "precision={policy: bf16}")


class Case(NamedTuple):
    """A case. said: what the notes recommend. link: between hosts. inside: between GPUs of a host."""

    name: str
    about: str
    said: str
    overrides: tuple[str, ...]
    gpu: str
    hosts: int = 1
    link: str | None = None
    inside: str | None = None


def model(layers: int, width: int, heads: int, seq: int, batch: int, vocab: int = 32000) -> tuple[str, ...]:
    """A model of Llama's kind."""
    sizes = f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", f"model.vocab={vocab}"
    return (*LLAMA, *sizes, f"data.seq_len={seq}", f"data.global_batch={batch}")


_LARGE = model(40, 5120, 40, 2048, 64)
CASES = (
    Case("1", "one host, the model fits a GPU", "DDP, or ZeRO", model(24, 1024, 16, 1024, 64, 50304), "h200"),
    Case("2", "one host, it does not fit a GPU; NVLink", "pipeline, ZeRO or tensor", _LARGE, "a100-80"),
    Case("2b", "the same over PCIe 3", "pipeline before ZeRO", _LARGE, "a100-80", inside="pcie3"),
    Case("3", "one host, a layer does not fit", "tensor", model(2, 32768, 256, 1024, 8), "a100-80"),
    Case(
        "4",
        "eight hosts, fast links",
        "ZeRO, or all of pipeline, tensor, data",
        model(80, 8192, 64, 4096, 256),
        "h200",
        8,
    ),
    Case(
        "5",
        "four hosts, 10 Gbit/s, 40 GB",
        "data x pipeline x tensor + ZeRO-1",
        model(40, 5120, 40, 2048, 256),
        "a100-40",
        4,
        "10gbit",
    ),
)
# {kind: (the values of a layout, hosts, devices of a host) -> whether it is of that kind}
KINDS: dict[str, Callable[[dict[str, Any], int, int], bool]] = {
    "ddp alone": lambda values, hosts, here: values["mesh.data"] == hosts * here,
    "zero3 alone": lambda values, hosts, here: (
        values["mesh.fsdp"] == hosts * here and values["parallel.strategy"] == "zero3"
    ),
    "pipeline alone": lambda values, hosts, here: values["mesh.pipe"] == hosts * here,
    "tensor alone": lambda values, hosts, here: values["mesh.tensor"] == hosts * here,
    "pipeline between hosts, ZeRO inside": lambda values, hosts, here: (
        values["mesh.pipe"] == hosts > 1 and values["mesh.fsdp"] == here
    ),
}


def kinds_of(config: Config, cluster: PlanCluster) -> list[Layout]:
    """The candidates that are of one of the kinds, with 1F1B alone."""
    where = (cluster.hosts, cluster.per_host)
    return [
        each
        for family in layouts(config, cluster.devices, per_host=cluster.per_host)
        for each in family
        if any(kind(each.values, *where) for kind in KINDS.values())
        and each.values["parallel.schedule"] in ("accumulate", "one_f_one_b")
    ]


def searched(case: Case, known: Known, *, only_kinds: bool = False) -> Search:
    """The candidates of a case, predicted. only_kinds: those of `kinds_of`, in half a minute."""
    one = "mesh={data: 1, fsdp: 1, tensor: 1}"
    config = load_config(ROOT / "configs" / "llama_7b_h200.yaml", [*case.overrides, one], planned=True)
    precision = precision_of(config.precision)
    cluster = gpu_cluster(case.gpu, precision, hosts=case.hosts, per_host=8, link=case.link, inside=case.inside)
    among = kinds_of(config, cluster) if only_kinds else None
    said = lambda text: print(f"  {text}", file=sys.stderr, flush=True)  # noqa: E731
    return search(config, cluster, known, among=among, progress=said)


def found_of(case: Case) -> dict[str, Any]:
    """The figures of a case."""
    known, began = Known(), time.perf_counter()
    found = searched(case, known)
    tie = tie_of(found.fitting, found.cluster.spread)
    best = found.fitting[0].seconds.total
    return {
        "case": case._asdict(),
        "parameters": known.model(tie.winner.config).parameters,
        "considered": found.considered,
        "search_s": round(time.perf_counter() - began, 1),
        "choice": _row(tie.winner, best),
        "ties": [_row(each, best) for each in tie.members[:8]],
        "kinds": {name: best_of_kind(name, found) for name in KINDS},
    }


def _row(each: Predicted, best: float) -> dict[str, Any]:
    return {
        "layout": each.layout.name(),
        "seconds": each.seconds.total,
        "beside_the_fastest": each.seconds.total / best,
        "parts": each.seconds.parts(),
        "peak_bytes": each.peak,
    }


def best_of_kind(name: str, found: Search) -> dict[str, Any]:
    """The best layout of a kind; or how far the nearest of them is from fitting."""
    cluster, kind = found.cluster, KINDS[name]

    def of(candidates: list[Predicted]) -> list[Predicted]:
        return [each for each in candidates if kind(each.layout.values, cluster.hosts, cluster.per_host)]

    if fits := of(found.fitting):
        return _row(fits[0], found.fitting[0].seconds.total)
    nearest = min(of(found.tight), key=lambda each: each.peak, default=None)
    why = "not allowed, or more than twice the memory" if nearest is None else does_not_fit(nearest, cluster.memory)
    return {"refused": why}


@reports_mistakes
def main() -> int:
    """Print a table, and write the figures."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=output_file)
    given = parser.parse_args()
    figures = []
    for case in CASES:
        if given.case and case.name not in given.case:
            continue
        figures.append(found := found_of(case))
        if given.json:
            given.json.write_text(json.dumps({"measured": measured_on(), "cases": figures}, indent=1) + "\n")
        print(f"{case.name}. {case.about}: {found['parameters'] / 1e9:.2f} B parameters, {8 * case.hosts} x {case.gpu}")
        print(f"   notes: {case.said}; choice: {found['choice']['layout']}, {found['choice']['seconds']:.3g} s")
        for name, row in found["kinds"].items():
            said = row.get("refused") or f"{row['beside_the_fastest']:.2f} x: {row['layout']}"
            print(f"   {name}: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
