"""The textbook's numbers on data parallelism over a network: sizes of models, seconds of an all-reduce, speed-up.

Everything follows from a count of parameters, the cost of a collective (`jaxdist.collectives.cost`), and the rate of a
link (`jaxdist.plan.machines`). Nothing is measured, and no latency is counted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdist.collectives import Link, cost
from jaxdist.config.schema import ModelConfig
from jaxdist.models.bert import bert
from jaxdist.models.gpt import gpt
from jaxdist.models.resnet import resnet
from jaxdist.models.vit import vit

COMPARED = ("ring", "master_worker", "tree", "double_tree", "halving_doubling", "balanced_fusion")


class Case(NamedTuple):
    """Training on several hosts.

    size: bytes of the gradients, N. hosts: n. rate: bytes a second that a host sends, B.
    one: seconds of a step on one GPU. all: seconds of a step on all GPUs of a host, without other hosts.
    every: steps between two exchanges, of local SGD. gpus: of a host.
    """

    size: float
    hosts: int
    rate: float
    one: float
    all: float
    every: int
    gpus: int


# An iteration of 0.4 s on one GPU, of 0.42 s on the eight of a host; three hosts; gradients of ViT-Base in float16.
TEXTBOOK = Case(size=86e6 * 2, hosts=3, rate=10e9 / 8, one=0.4, all=0.42, every=10, gpus=8)


class Found(NamedTuple):
    """The numbers of a case, in seconds and as factors.

    limit: an all-reduce among very many hosts, 2 N/B. ring: among these hosts, 2 (n-1)/n N/B. flat: by a ring of all
        GPUs that knows no hosts, 2 (m-1)/m N/B for m GPUs.
    mixed: a step as the textbook adds it up, `one` + limit. mixed_speedup: n x all / mixed, beside one host.
    step, speedup: with the same two terms in both, all + ring.
    local_step, local_speedup: with one exchange in `every` steps.
    """

    limit: float
    ring: float
    flat: float
    mixed: float
    mixed_speedup: float
    step: float
    speedup: float
    local_step: float
    local_speedup: float


def found_of(case: Case) -> Found:
    """The numbers of a case.

    >>> from jaxdist.plan.costs import TEXTBOOK, found_of
    >>> found = found_of(TEXTBOOK)
    >>> f"{found.limit:.3f} {found.ring:.3f} {found.mixed:.3f} {found.mixed_speedup:.2f} {found.speedup:.2f}"
    '0.275 0.183 0.675 1.87 2.09'
    """
    limit, ring = 2 * case.size / case.rate, seconds(case, "ring")
    flat = seconds(case._replace(hosts=case.hosts * case.gpus), "ring")
    mixed, step, local = case.one + limit, case.all + ring, case.all + ring / case.every
    mixed_speedup, speedup, local_speedup = (case.hosts * case.all / each for each in (mixed, step, local))
    return Found(limit, ring, flat, mixed, mixed_speedup, step, speedup, local, local_speedup)


def seconds(case: Case, algorithm: str) -> float:
    """Seconds of an all-reduce of the gradients among the hosts by this algorithm."""
    found = cost("all_reduce", round(case.size), case.hosts, algorithm=algorithm)
    return found.seconds(Link(0.0, case.rate))


def _options(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig(name=name).replace(**keys)


# {name: a function that makes the model, without allocating any of it}.
COUNTED_MODELS: dict[str, Callable[[], Any]] = {
    "vit-base": lambda: vit(_options("vit"), max_length=0),
    "vit-huge": lambda: vit(_options("vit", layers=32, width=1280, heads=16, patch_size=14), max_length=0),
    "resnet101": lambda: resnet(_options("resnet", depth=101)),
    "bert-base": lambda: bert(_options("bert", layers=12, width=768, heads=12, vocab=30522), max_length=512),
    "gpt2": lambda: gpt(_options("gpt", layers=12, width=768, heads=12, vocab=50257), max_length=1024),
}


def parameters(model: str) -> int:
    """The number of parameters of a model of `COUNTED_MODELS`, counted from its shapes."""
    return int(COUNTED_MODELS[model]().parameters)
