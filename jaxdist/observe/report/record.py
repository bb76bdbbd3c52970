"""The record of a run as its report needs it: what the run directory holds, and what the traced step predicts."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxdist.observe.metrics import Curve, curve, work_unit

MetricLines = Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl


class LayoutRow(NamedTuple):
    """The layout of one parameter.

    - spec: the mesh axes that split each dim.
    - shards: how many different parts there are.
    - bytes_per_device, bytes_total: of the part that one device holds, and of the whole.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    shards: int
    bytes_per_device: int
    bytes_total: int


class Sent(NamedTuple):
    """What one device sends in a step over some axes for one purpose, by the ledger."""

    axes: tuple[str, ...]
    what: str
    op: str
    phases: tuple[str, ...]
    calls: int
    nbytes: float
    link: str


class Prediction(NamedTuple):
    """What the traced step says before it runs.

    - memory: bytes of one device at the peak, by part; they add up to the peak.
    - inside: what the part "temporary" holds at some time, by kind; these need not be there together.
    - compiled: the same sums by the compiler, where it was asked.
    """

    layout: tuple[LayoutRow, ...]
    memory: Mapping[str, int]
    inside: Mapping[str, int]
    sent: tuple[Sent, ...]
    compiled: Mapping[str, int] = MappingProxyType({})

    @property
    def peak(self) -> int:
        """The most memory of a device at any time, in bytes."""
        return sum(self.memory.values())

    @property
    def parameters(self) -> int:
        """How many numbers the parameters are."""
        return sum(math.prod(row.shape) for row in self.layout)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(each.nbytes for each in self.sent)


class RemedyRow(NamedTuple):
    """A change that may save memory.

    - state: "in use", "possible" or "not here".
    - saves, flops, sent: bytes of a device's memory that it frees, and FLOPs and bytes sent as multiples of the run's;
        None where it was not compiled.
    """

    name: str
    overrides: str
    state: str
    why: str = ""
    saves: int | None = None
    flops: float | None = None
    sent: float | None = None


class RunRecord(NamedTuple):
    """Everything that a report shows of a run. Each part may be empty.

    - settings: the configuration without secrets, section by section. defaults: the same keys with their defaults.
    - environment: the content of env.json.
    - incidents: the lines of incidents.jsonl. checkpoints: their steps.
    - prediction: or, as a sentence, why there is none.
    - plan: the content of plan.json, what `jaxdist plan` predicted; {} without one.
    - notes: sentences about files of the run directory that could not be read.
    """

    title: str
    settings: Mapping[str, Any] = MappingProxyType({})
    defaults: Mapping[str, Any] = MappingProxyType({})
    environment: Mapping[str, Any] = MappingProxyType({})
    metrics: MetricLines = ()
    incidents: Sequence[Mapping[str, Any]] = ()
    checkpoints: Sequence[int] = ()
    samples: str = ""
    prediction: Prediction | str = "It was not asked for."
    remedies: Sequence[RemedyRow] = ()
    plan: Mapping[str, Any] = MappingProxyType({})
    notes: Sequence[str] = ()

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh axes, outermost first."""
        sizes = mapping(self.environment.get("mesh"))
        return {str(axis): size for axis, size in sizes.items() if type(size) is int and size > 0}

    @property
    def devices(self) -> dict[str, int]:
        """How many devices there were of each kind."""
        return {str(kind): n for kind, n in mapping(self.environment.get("devices")).items() if type(n) is int}

    @property
    def simulated(self) -> bool:
        """Whether times say nothing about GPUs, because the devices were simulated by a CPU."""
        return "cpu" in self.devices

    @property
    def data(self) -> dict[str, Any]:
        """Facts of the data source."""
        return mapping(self.environment.get("data"))

    @property
    def unit(self) -> str:
        """The unit of work: "tokens" or "samples"."""
        return work_unit(self.metrics)

    @property
    def work(self) -> float:
        """Tokens or samples of a step; NaN where that is not known."""
        unit = self.unit
        timed = [record for record in self.metrics if "step_s" in record and f"{unit}_per_s" in record]
        if timed:
            work = median(np.array([record["step_s"] * record[f"{unit}_per_s"] for record in timed], float))
            return round(work) if math.isfinite(work) else work
        data = mapping(self.settings.get("data"))
        sizes: list[Any] = [data.get("global_batch"), data.get("seq_len") if unit == "tokens" else 1]
        return math.prod(sizes) if all(type(size) is int for size in sizes) else math.nan

    @property
    def rates(self) -> Curve:
        """Tokens, or samples, per second of each step."""
        return curve(self.metrics, f"{self.unit}_per_s")

    @property
    def rate(self) -> float:
        """The median of `rates`, without the steps that are slower than half of it, because of compilation."""
        rates = self.rates.values
        usual = median(rates)
        return median(rates[~(rates < usual / 2)])

    @property
    def step_s(self) -> float:
        """The median time of a step in seconds; NaN where that is not known."""
        own = curve(self.metrics, "step_s").values
        return median(own) if own.size else (self.work / self.rate if self.rate > 0 else math.nan)

    @property
    def last_step(self) -> int:
        """The last step that is recorded; 0 without any."""
        return max((record["step"] for record in self.metrics), default=0)


class Losses(NamedTuple):
    """Losses and baselines in one unit."""

    train: Curve
    evaluation: Curve
    unit: str
    baselines: dict[str, float]

    @property
    def own(self) -> tuple[str, float, int]:
        """(name, value, step) of the loss that is compared with the baselines: the best evaluation or, without one,
        the last training loss; NaN without either."""
        finite = np.isfinite(self.evaluation.values)
        if finite.any():
            best = int(np.argmin(np.where(finite, self.evaluation.values, np.inf)))
            return "best evaluation", float(self.evaluation.values[best]), int(self.evaluation.steps[best])
        if self.train.steps.size:
            return "final training loss", float(self.train.values[-1]), int(self.train.steps[-1])
        return "loss", math.nan, 0


def losses_of(record: RunRecord) -> Losses:
    """The losses of a run: in bits per byte where the data are bytes, in nats per token, or in the model's own unit."""
    unit, nats, bits = "nats per token", 1.0, math.log(2)  # nats, bits: factors from these to the unit
    if record.unit == "samples":  # the unit of a user's own loss is not known, and there are no baselines
        unit = "the model's own unit"
    elif record.data.get("unit") == "bytes":
        unit, nats, bits = "bits per byte", 1 / math.log(2), 1.0
    train, evaluation = (curve(record.metrics, key, nats) for key in ("loss", "eval/loss"))
    marks = mapping(record.environment.get("baselines"))
    baselines = {str(name): value * bits for name, value in marks.items() if type(value) in (int, float)}
    return Losses(train, evaluation, unit, baselines)


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one: files of a run directory may hold anything."""
    return dict(value) if isinstance(value, Mapping) else {}


def median(values: np.ndarray) -> float:
    """The median of the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan
