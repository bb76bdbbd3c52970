"""The work of the command `cost`: its numbers and tables."""

from typing import Any

from jaxdist.plan.costs import COMPARED, COUNTED_MODELS, Case, found_of, parameters, seconds
from jaxdist.plan.machines import DEVICES, HOSTS, LINK_RATES, pcie
from jaxdist.plan.traced.sharding import aligned


def cost_lines(case: Case, size: str, link: str) -> list[str]:
    """All that the command prints. size, link: what the size is, and the name of the link, in words."""
    return [
        *_model_lines(),
        "",
        *_case_lines(case, size, link),
        "",
        *_algorithm_lines(case),
        "",
        *_link_lines(case),
        "",
        *_device_lines(),
        "",
        *_host_lines(),
    ]


def figures_of(case: Case) -> dict[str, Any]:
    """The same as JSON: {"parameters", "case", "found", "algorithms", "devices", "hosts", "links"}."""
    return {
        "parameters": {name: parameters(name) for name in COUNTED_MODELS},
        "case": case._asdict(),
        "found": found_of(case)._asdict(),
        "algorithms": {name: seconds(case, name) for name in COMPARED},
        "devices": {name: device._asdict() for name, device in DEVICES.items()},
        "hosts": {name: host._asdict() for name, host in HOSTS.items()},
        "links": LINK_RATES,
    }


def _model_lines() -> list[str]:
    rows = [("model", "parameters", "MB in float16", "MB in float32")]
    for name in COUNTED_MODELS:
        count = parameters(name)
        rows.append((name, f"{count:,}", f"{2 * count / 1e6:,.1f}", f"{4 * count / 1e6:,.1f}"))
    return ["Parameters, counted from the shapes of the models", *aligned(rows, right=(1, 2, 3))]


def _case_lines(case: Case, size: str, link: str) -> list[str]:
    """The case, formula by formula."""
    found, n, gpus = found_of(case), case.hosts, case.hosts * case.gpus
    data, rate = f"{case.size / 1e6:,.4g} MB", f"{case.rate / 1e9:.4g} GB/s"
    one, whole, every = f"{case.one:g}", f"{case.all:g}", case.every

    def faster(step: float, factor: float) -> tuple[str, str, str, str]:
        return "  speed-up over one host", "n x host / step", f"{n} x {whole} / {step:.3f}", f"{factor:.2f} x"

    def took(what: str, formula: str, numbers: str, took_s: float) -> tuple[str, str, str, str]:
        return what, formula, numbers, f"{took_s:.3f} s"

    rows = [
        took("all-reduce among very many hosts", "2 N/B", f"2 x {data} / {rate}", found.limit),
        took(f"a ring of {n} hosts", f"2 {n - 1}/{n} N/B", "", found.ring),
        took(f"a ring of {gpus} GPUs that knows no hosts", f"2 {gpus - 1}/{gpus} N/B", "", found.flat),
        took("a step, the textbook's sum", "one GPU + 2 N/B", f"{one} + {found.limit:.3f}", found.mixed),
        faster(found.mixed, found.mixed_speedup),
        took("a step, the same terms in both", "host + ring", f"{whole} + {found.ring:.3f}", found.step),
        faster(found.step, found.speedup),
        took(f"local SGD, H = {every}", "host + ring/H", f"{whole} + {found.ring:.3f} / {every}", found.local_step),
        faster(found.local_step, found.local_speedup),
    ]
    head = f"{n} hosts of {case.gpus} GPUs; a step takes {case.one:g} s on one GPU, {case.all:g} s on all of a host"
    return [head, f"N = {size} = {data}; B = {link} = {rate} one way", *aligned(rows, right=(3,))]


def _algorithm_lines(case: Case) -> list[str]:
    rows = [("algorithm", "seconds", "beside the ring")]
    ring = seconds(case, "ring")
    rows += [(name, f"{each:.3f}", f"{each / ring:.2f} x") for name in COMPARED for each in [seconds(case, name)]]
    return [f"That all-reduce among {case.hosts} hosts, without latency", *aligned(rows, right=(1, 2))]


def _link_lines(case: Case) -> list[str]:
    """The ring on every link there is, the slowest first."""
    rows = [("link", "GB/s one way", "ms")]
    for name, rate in sorted({"10gbit": 1.25e9, **LINK_RATES}.items(), key=lambda pair: pair[1]):
        rows.append((name, f"{rate / 1e9:,.2f}", f"{found_of(case._replace(rate=rate)).ring * 1e3:,.2f}"))
    return [
        f"That ring of {case.hosts} on other links; a host sends by all its network cards",
        *aligned(rows, right=(1, 2)),
    ]


def _device_lines() -> list[str]:
    head = ("GPU", "GB", "TFLOP/s, 16 bits", "32 bits", "memory GB/s", "NVLink GB/s", "PCIe x16 GB/s", "source")
    rows = [head]
    for name, each in DEVICES.items():
        nvlink = f"{each.nvlink / 1e9:,.0f}" if each.nvlink else "-"
        bus = f"gen {each.pcie}: {pcie(each.pcie) / 1e9:.2f}"
        figures = (f"{each.memory / 1e9:.0f}", f"{each.half / 1e12:,.0f}", f"{each.single / 1e12:,.1f}")
        rows.append((name, *figures, f"{each.bandwidth / 1e9:,.0f}", nvlink, bus, each.source))
    title = (
        "GPUs: dense products; 32 bits are TF32 from A100 on; NVLink and PCIe one way. Makers' figures, not measured"
    )
    return [title, *aligned(rows, right=range(1, 7))]


def _host_lines() -> list[str]:
    rows = [("host", "GPUs", "cards x Gbit/s", "Gbit/s", "GB/s", "a GPU", "PCIe", "source")]
    for name, each in HOSTS.items():
        cards = f"{each.cards} x {each.card_rate * 8 / 1e9:.0f}"
        rates = (
            f"{each.network * 8 / 1e9:,.0f}",
            f"{each.network / 1e9:,.2f}",
            f"{each.network / each.devices / 1e9:.2f}",
        )
        rows.append((name, f"{each.devices} {each.device}", cards, *rates, f"gen {each.pcie}", each.source))
    return ["Hosts: network cards for GPUs, one way", *aligned(rows, right=(2, 3, 4, 5))]
