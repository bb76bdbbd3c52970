"""scripts/bench/collectives.py: figures on simulated devices, bytes counted on virtual hosts, wrong options."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import child
import pytest
from script_modules import load_module

from jaxdist import collectives
from jaxdist.lab.network import unavailable

ROOT = Path(__file__).parents[2]
ENVIRON = child.environment()  # conftest.py gives the tests themselves eight devices


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "collectives.py"), *arguments]
    return subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=120)


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "out.json"
    done = script(*arguments, "--json", str(out))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert [row["algorithm"] for row in found["rows"]] == [line.split()[1] for line in table(done.stdout)]
    return found


def table(printed: str) -> list[str]:
    lines = printed.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.split()[:2] == ["bytes", "algorithm"]) + 1 :]


@pytest.mark.slow
def test_simulated_devices(tmp_path: Path) -> None:
    options = ("--algorithms", "ring,tree,auto", "--bytes", "64,1kb", "--rounds", "2", "--platform", "cpu")
    found = bench(tmp_path, "--mesh", "2x2", *options, "--plot", str(tmp_path / "out.svg"))
    assert found["mesh"] == {"data": 2, "fsdp": 2}
    assert [(row["bytes"], row["algorithm"]) for row in found["rows"]] == [
        (nbytes, name) for nbytes in (64, 1024) for name in ("ring", "tree", "auto")
    ]
    for row in found["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        cost = collectives.cost("all_reduce", row["bytes"], 2, 2, algorithm=row["chosen"])
        link = collectives.Link(**found["link"])
        assert row["predicted_ms"] == pytest.approx(cost.seconds(link) * 1e3, rel=1e-4)
        assert row["bus_mb_per_s"] == pytest.approx(1.5 * row["bytes"] / row["median_ms"] / 1e3, rel=1e-3)
    assert "</svg>" in (tmp_path / "out.svg").read_text()


@pytest.mark.slow
def test_sizes_are_made_divisible(tmp_path: Path) -> None:
    options = ("--operation", "reduce_scatter", "--algorithms", "native", "--bytes", "1kb:4kb", "--rounds", "1")
    found = bench(tmp_path, "--devices", "3", *options, "--platform", "cpu")
    assert [row["bytes"] for row in found["rows"]] == [1032, 4104]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--algorithms", "rign"), "did you mean 'ring'?"),
        (("--algorithms", "native", "--wire-dtype", "int8"), "an algorithm such as ring"),
        (("--bytes", "5tb"), "--bytes: '5tb'; allowed"),
        (("--mesh", "2x2", "--devices", "4"), "--mesh and --devices: one of the two"),
        (("--link", "fast"), "allowed: local"),
        (("--virtual-hosts", "3", "--rate", "fast"), "rate: 'fast'"),
        (("--json", "no/such/folder/out.json"), "make it first"),
        (("--speed",), "unrecognized arguments: --speed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_options(arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, before any device or host is started."""
    assert load_module(ROOT / "scripts" / "bench" / "collectives.py").main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("error: ") and error in printed.err


@pytest.mark.slow
@pytest.mark.xdist_group("network")
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_what_leaves_a_virtual_host_is_what_it_should_cost(tmp_path: Path) -> None:
    """Times are another matter: the machine may be busy."""
    options = ("--algorithms", "ring,master_worker,native", "--bytes", "1mb", "--rounds", "3")
    found = bench(tmp_path, "--virtual-hosts", "3", "--rate", "200mbit", *options)
    assert found["virtual_hosts"] == {"rate": "200mbit", "burst": "256kb", "congestion": "cubic"}
    assert found["bits_per_s"] == 200_000_000
    for row in found["rows"]:
        cost = collectives.cost("all_reduce", row["bytes"], 3, algorithm=row["algorithm"])
        assert (max(row["cost_bytes"]), sum(row["cost_bytes"])) == (cost.busiest, cost.total)
        assert row["payload_bytes"] == pytest.approx(row["cost_bytes"], rel=0.05)
        assert sum(row["interface_bytes"]) > sum(row["payload_bytes"])
