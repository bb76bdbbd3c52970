"""The plan of a configuration: the choice, its reasons, and what is written of it."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.load import to_yaml, values_of
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.files.regular import replace_file
from jaxdist.mesh import AXES
from jaxdist.plan.changes import changed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import PEAK, memory_of
from jaxdist.plan.search.choose import Predicted, Search, Tie, by_seconds, if_allowed, search, tie_of, unplannable
from jaxdist.plan.search.cluster import PlanCluster
from jaxdist.plan.search.confirm import COMPILED, TRACED, confirm
from jaxdist.plan.search.reasons import Other, Turn, does_not_fit, others, slower, turns
from jaxdist.plan.search.space import Layout, layout_of


class LayoutPlan(NamedTuple):
    """A plan.

    search: all candidates. tie: those that nothing tells apart, the choice first.
    others: the nearest that lost. turns: what would have to be true for others to win.
    notes: what was compared and what could not be. basis: where the rates are from.
    asked: the layout of `--explain`, with why it is, or is not, the choice.
    """

    config: Config
    search: Search
    tie: Tie
    others: list[Other]
    turns: list[Turn]
    notes: list[str]
    basis: str
    asked: Other | None = None

    @property
    def cluster(self) -> PlanCluster:
        """What the plan is for."""
        return self.search.cluster

    @property
    def winner(self) -> Predicted:
        """The choice."""
        return self.tie.winner


def plan_layout(
    config: Config,
    cluster: PlanCluster,
    *,
    basis: str,
    traced: int = TRACED,
    compiled: int = COMPILED,
    asked: Layout | None = None,
    known: Known | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LayoutPlan:
    """Plan a configuration for a cluster.

    traced, compiled: how many of the best candidates are traced, and compiled.
    asked: a layout that is argued beside the choice.
    known: what is known from other plans of the same model.

    Raises `UserError` if no layout is allowed, or none fits.
    """
    known = known or Known()
    if (why := unplannable(config, known)) is not None:
        raise UserError(f"plan: {why}")
    found = search(config, cluster, known, progress=progress)
    notes = list[str]()
    if traced or compiled:
        pool = by_seconds([*found.fitting, *found.near])
        first = tie_of(pool, cluster.spread).members if pool else []
        rest = [each for each in pool if each not in first]
        candidates, told = confirm([*first, *rest], cluster, traced=traced, compiled=compiled, progress=progress)
        notes += told
        certain = [each for each in candidates if each.how != "closed form" or each.peak <= cluster.memory]
        found = found._replace(fitting=by_seconds(certain))
    if not found.fitting:
        raise UserError(_nothing_fits(config, found, asked, known))
    tie = tie_of(found.fitting, cluster.spread)
    progress("what would have to be true for another layout to win")
    argued = None if asked is None else argue(config, asked, cluster, tie, known)
    return LayoutPlan(config, found, tie, others(found, tie), turns(config, found, tie, known), notes, basis, argued)


def _nothing_fits(config: Config, found: Search, asked: Layout | None, known: Known) -> str:
    """Why there is no plan, in a line. asked: a layout that is argued, too."""
    cluster, nearest = found.cluster, _with_all_memory(found.nearest, known)
    said = f"the nearest, {nearest.layout.name()}, {does_not_fit(nearest, cluster.memory)}"
    if asked is not None:
        try:
            why = does_not_fit(_argued(config, asked, cluster, known), cluster.memory)
        except UserError as error:
            why = str(error)
        said += f"; {asked.name()}: {why}"
    return (
        f"plan: no layout of {cluster.devices} x {cluster.name} fits; {said}; allowed: more devices, or what changes"
        " the training: a smaller data.global_batch or data.seq_len, another optimizer"
    )


def argue(config: Config, layout: Layout, cluster: PlanCluster, tie: Tie, known: Known) -> Other:
    """A layout beside the choice. Raises the `UserError` of one that is not allowed."""
    candidate = _argued(config, layout, cluster, known)
    if candidate.peak > cluster.memory:
        return Other(candidate, does_not_fit(candidate, cluster.memory))
    if candidate.layout == tie.winner.layout:
        return Other(candidate, "it is the choice")
    if candidate.seconds.total <= (1 + cluster.spread) * tie.fastest:
        return Other(candidate, f"as fast as the choice, within {cluster.spread:.0%}; the choice is simpler")
    return Other(candidate, slower(candidate, tie.winner))


def _argued(config: Config, layout: Layout, cluster: PlanCluster, known: Known) -> Predicted:
    """A layout with all its figures. Raises the `UserError` of one that is not allowed."""
    found = if_allowed(config, layout, cluster._replace(memory=math.inf), known)  # its seconds too, if it does not fit
    if isinstance(found, str):
        raise UserError(found)
    return found


def _with_all_memory(each: Predicted, known: Known) -> Predicted:
    """A layout with all that it needs, where it needs too much and `predicted` has stopped early."""
    return each._replace(memory=memory_of(each.config, known))


def candidate_to_json(each: Predicted) -> dict[str, Any]:
    """{"layout", "overrides", "seconds", "parts", "memory", "memory_is", "sent_bytes"}."""
    return {
        "layout": each.layout.name(),
        "overrides": each.layout.arguments(),
        "seconds": each.seconds.total,
        "parts": each.seconds.parts(),
        "memory": each.memory,
        "peak_bytes": each.memory[PEAK],
        "memory_is": each.how,
        "sent_bytes": each.sent,
    }


def layout_plan_to_json(plan: LayoutPlan) -> dict[str, Any]:
    """The plan for programs: choice, ties, others with reasons, turns, what was refused and why. What has no bound, as
    memory that is not judged, is None: JSON has no infinity."""
    cluster = plan.cluster._asdict()
    cluster |= {"inside": plan.cluster.inside._asdict(), "between": plan.cluster.between._asdict()}
    cluster |= {"hidden": dict(plan.cluster.hidden)}
    tree = {
        "choice": candidate_to_json(plan.winner),
        "ties": [candidate_to_json(each) for each in plan.tie.members],
        "others": [{**candidate_to_json(each.candidate), "why": each.why} for each in plan.others],
        "turns": [{"what": each.what, **candidate_to_json(each.winner)} for each in plan.turns],
        "refused": dict(plan.search.refused),
        "considered": plan.search.considered,
        "search_s": plan.search.took,
        "cluster": cluster,
        "basis": plan.basis,
        "notes": plan.notes,
        "asked": None if plan.asked is None else {**candidate_to_json(plan.asked.candidate), "why": plan.asked.why},
    }
    finite: dict[str, Any] = _without_infinities(tree)
    return finite


def _without_infinities(tree: Any) -> Any:
    """A tree of dicts and lists with None for numbers that are not finite."""
    if isinstance(tree, dict):
        return {key: _without_infinities(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return [*map(_without_infinities, tree)]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def layout_plan_text(plan: LayoutPlan) -> str:
    """The content of plan.json."""
    return json.dumps(layout_plan_to_json(plan), indent=1, allow_nan=False) + "\n"


def write_plan(plan: LayoutPlan, folder: Path) -> list[Path]:
    """Write plan.json, plan.yaml, which trains, and plan.svg to a folder. Returns the paths."""
    from jaxdist.plan.search.draw import draw_plan  # matplotlib, which only pictures need

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("plan.json", "plan.yaml", "plan.svg")]
    replace_file(paths[0], layout_plan_text(plan).encode())
    replace_file(paths[1], launchable(plan, paths[0]).encode())
    draw_plan(plan.tie.members, plan.others, paths[2])
    return paths


def launchable(plan: LayoutPlan, path: Path) -> str:
    """The configuration of the choice as YAML, with what was predicted in its first line.

    path: of plan.json, which its run keeps.
    """
    best, simulated = plan.winner, plan.winner.config.devices.simulated
    there = {"observe.plan": str(path.absolute()), "devices.simulated": simulated and plan.cluster.devices}
    config = changed(best.config, there)
    devices = f"{plan.cluster.devices} x {plan.cluster.name}"
    return f"# {best.layout.name()}: {best.seconds.total:.4g} s a step predicted for {devices}\n{to_yaml(config)}"


def launch_command(plan: LayoutPlan, path: str) -> str:
    """The command that trains with a plan's YAML. What differs between hosts and clusters is in capitals."""
    if plan.cluster.hosts == 1:
        return f"jaxdist train {path}"
    job = f"-n 1 --nnodes {plan.cluster.hosts} --node-rank R --coordinator HOST:PORT --token-file FILE"
    return f"jaxdist launch {job} -- jaxdist train {path} --run-dir SHARED/DIR"


def layout_named(text: Sequence[str], config: Config, devices: int) -> Layout:
    """The layout that `--explain` names by overrides: ["mesh.fsdp=8", "parallel.strategy=zero3"]; axes that are not
    named are 1, and other keys as they are configured. Raises `UserError` for what is no override of a layout."""
    values = layout_of(config).values | {f"mesh.{axis}": 1 for axis in AXES}
    for each in text:
        key, equals, _ = each.partition("=")
        if not equals or not key.startswith(("mesh.", "parallel.", "memory.", "precision.")):
            raise UserError(
                f"--explain: {each!r} is no key of a layout; allowed: mesh.fsdp=8, parallel.strategy=zero3,"
                " memory.remat=full, ..."
            )
    values |= values_of(config, text)
    size = math.prod(values[f"mesh.{axis}"] for axis in AXES)
    if size != devices:
        raise UserError(
            f"--explain: the sizes of the mesh multiply to {size}, and the plan is for {devices} devices; give sizes of"
            f" {devices}, such as --explain mesh.data={devices}"
        )
    return Layout(tuple(values.items()))
