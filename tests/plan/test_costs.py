"""`jaxdist cost`: the textbook's numbers, the tables of hardware, the page."""

import json
from pathlib import Path

import pytest
from child import ROOT

from jaxdist.cli.cost import main
from jaxdist.plan.compiled.hardware import GPUS
from jaxdist.plan.costs import COMPARED, COUNTED_MODELS, TEXTBOOK, found_of, parameters, seconds
from jaxdist.plan.machines import DEVICES, HOSTS, LINK_RATES, pcie


def test_the_numbers_of_the_textbook() -> None:
    """86 M parameters in 16 bits over 10 Gbit/s, three hosts."""
    found = found_of(TEXTBOOK)
    assert found.limit == pytest.approx(0.2752) and found.ring == pytest.approx(0.2752 * 2 / 3, rel=1e-6)
    assert found.mixed == pytest.approx(0.6752) and int(found.mixed_speedup * 100) == 186  # the textbook cuts it off
    assert found.flat == pytest.approx(0.2752 * 23 / 24, rel=1e-6)
    assert f"{found.step:.3f} {found.speedup:.2f}" == "0.603 2.09"
    assert f"{found.local_step:.3f} {found.local_speedup:.2f}" == "0.438 2.87"


def test_one_host_more_is_worth_less_and_less() -> None:
    more = [found_of(TEXTBOOK._replace(hosts=n)) for n in (2, 3, 8, 1000)]
    assert [each.ring for each in more] == sorted(each.ring for each in more)
    assert more[-1].ring == pytest.approx(TEXTBOOK.size * 2 / TEXTBOOK.rate, rel=2e-3)
    assert seconds(TEXTBOOK, "master_worker") == pytest.approx(3 * seconds(TEXTBOOK, "ring"), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        pytest.param("vit-base", 86_567_656, marks=pytest.mark.slow),
        pytest.param("vit-huge", 632_045_800, marks=pytest.mark.slow),
        pytest.param("resnet101", 44_549_160, marks=pytest.mark.slow),
        ("bert-base", 109_514_298),
        pytest.param("gpt2", 124_439_808, marks=pytest.mark.slow),
    ],
)
def test_parameters_are_counted_from_the_models(model: str, count: int) -> None:
    assert parameters(model) == count and model in COUNTED_MODELS


def test_the_tables() -> None:
    """The rates that the textbook gives, all of one direction; every figure has a source."""
    assert {f"{pcie(3) / 1e9:.2f}", f"{pcie(4) / 1e9:.2f}"} == {"15.75", "31.51"}
    assert DEVICES["v100"].nvlink == 6 * 25e9 and DEVICES["a100-40"].nvlink == 12 * 25e9 and not DEVICES["t4"].nvlink
    gbits = {name: round(host.network * 8 / 1e9) for name, host in HOSTS.items()}
    assert (gbits["p3dn.24xlarge"], gbits["p4d.24xlarge"], gbits["dgx-a100"]) == (100, 400, 1600)
    assert HOSTS["p4d.24xlarge"].pcie == 3 and HOSTS["dgx-a100"].pcie == 4
    assert all(host.device in DEVICES for host in HOSTS.values())
    assert all(each.source for each in [*DEVICES.values(), *HOSTS.values()])
    assert {"h100", "h200", "b200"} <= DEVICES.keys() & GPUS.keys() and DEVICES["h200"].half == GPUS["h200"].bf16
    assert all(rate > 1e9 for rate in LINK_RATES.values()) and "nvlink-t4" not in LINK_RATES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "1"], "--hosts: 1; allowed: an integer >= 2 and"),
        (["--every", "0"], "--every: 0; allowed: an integer >= 1"),
        (["--compute", "nan"], "--compute: nan; allowed: a number > 0"),
        (["--link", "10gb"], "--link: '10gb' is not known; allowed: a rate such as 10gbit, or pcie3"),
        (["--link", "nvlink"], "--link: 'nvlink' is not known"),
        (["--link", "0gbit"], "--link: '0gbit' is not known"),
        (["--link", "1.2.3gbit"], "--link: '1.2.3gbit' is not known"),
        (["--size", "12 apples"], "--size: '12 apples'; allowed: bytes, as 172MB"),
        (["--size", "1.5"], "1000 or more"),
        (["--size", "9" * 40], "--size: "),
        (["--model", "vitbase"], "did you mean vit-base?"),
        (["--model", "gpt2", "--size", "1"], "not allowed with argument"),
        (["--json", "nowhere/a.json"], "its folder does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err, err


@pytest.mark.slow
def test_the_page_shows_what_jaxdist_cost_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    assert main(["--json", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr().out
    missing = [line for line in printed.splitlines() if line not in shown]
    assert not missing, missing
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["found"]["limit"] == pytest.approx(0.2752) and set(figures["algorithms"]) == set(COMPARED)
    assert main(["--size", "1GB", "--hosts", "2", "--link", "p4d.24xlarge", "--compute", "0.1"]) == 0
    assert "a ring of 2 hosts" in capsys.readouterr().out
    assert main(["--model", "bert-base", "--bytes", "4"]) == 0
    assert (
        "109,514,298 parameters of bert-base, counted from the model, x 4 bytes = 438.1 MB" in capsys.readouterr().out
    )
