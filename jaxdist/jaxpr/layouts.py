"""Layouts that a loss or a layer asks for inside the manual region, where a device sees its own part of arrays only."""

import ast
import linecache
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxdist.errors import UserError
from jaxdist.jaxpr.source import PACKAGE, is_installed, line_of_user
from jaxdist.jaxpr.walk import every_equation
from jaxdist.specs import path_name

ASKING = {"sharding_constraint": "with_sharding_constraint", "device_put": "device_put"}  # primitives
# What asks for a layout, in a call that failed while it was traced: a function, or a keyword that is not None.
_CALLED = {"with_sharding_constraint", "device_put", "reshard", "shard_map"}
_KEYWORDS = {"in_shardings", "out_shardings"}


def refuse_call(error: Exception, batch: Any, mesh: Any, trace: Callable[[], Any], *, other: bool) -> None:
    """Raise `UserError` if a call of a step failed for its batch, its state, a constant of a model, or the layout that
    a loss asks for.

    trace: see `refuse_layouts`. other: whether the state has another layout than that of the step.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        _check_leaf(error, f"batch: {path_name(path)}".removesuffix(": "), leaf, mesh)
    refuse_context(mesh)
    if isinstance(error, ValueError):
        if other:
            raise UserError(
                "state: laid out differently from the one this step was compiled for; make another step"
            ) from error
        refuse_layouts(error, trace)
    _refuse_constants(error)


def _refuse_constants(error: Exception) -> None:
    """Raise `UserError` if a unit of a model has a constant where the type check of `shard_map` wants what differs from
    device to device. On one device nothing differs, and the unit runs."""
    if "manual ax" not in str(error):  # as in "varying manual axes" and "manual axis types"
        return
    own = (frame for frame in _frames_of_user(error) if not is_installed(frame.filename))
    place = next((f" ({Path(frame.filename).name}:{frame.lineno})" for frame in own), "")
    raise UserError(
        f"model: has a constant{place} where JAX wants what differs from device to device; allowed: 0 * h in place of"
        " zeros, where a loop starts or in a branch of a condition, and jaxdist.nn.gelu_erf in place of"
        " jax.nn.gelu(x, approximate=False); or give the model as a loss of your own (docs/own_loss.md); jax says:"
        f" {str(error).partition(chr(10))[0]}"
    ) from error


def refuse_context(mesh: Any) -> None:
    """Raise `UserError` inside a `jax.set_mesh` of another mesh."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context.shape_tuple != mesh.shape_tuple:
        raise UserError(
            f"jax.set_mesh: is of a mesh with the axes {', '.join(map(str, context.axis_names))}; allowed: none, or"
            " that of jaxdist.make_mesh; make states and call steps outside of it"
        )


def refuse_leaf(where: str, shown: str) -> NoReturn:
    """Raise the `UserError` for a leaf of a batch that is no array of numbers."""
    raise UserError(
        f"{where} is {shown}; allowed: arrays of numbers, [rows, ...]; of a Hugging Face dataset by"
        " .with_format('numpy')"
    )


def _check_leaf(error: Exception, where: str, leaf: Any, mesh: Any) -> None:
    """Raise `UserError` for a leaf of a batch that holds no numbers, or is on other devices or another mesh."""
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) or not isinstance(mesh, Mesh):
        return
    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
            refuse_leaf(where, f"an array of {array.dtype}" if array.ndim else f"a {type(leaf).__name__}")
        return
    sharding = leaf.sharding
    axes = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
    if leaf.committed and (sharding.device_set != {*mesh.devices.flat} or AxisType.Explicit in axes):
        raise UserError(
            f"{where} is on another mesh than the step's, or on some of its devices; allowed: NumPy arrays, and arrays"
            " on that mesh; give jax.device_put(batch, NamedSharding(mesh, jaxdist.BATCH_SPEC))"
        ) from error


def refuse_unequal(tree: Any, shardings: Any) -> NoReturn:
    """Raise `UserError` that names the first array whose values differ between the processes.

    Called where the error of jax for the whole tree is handled, on all processes: each placement compares them again.
    """
    for (path, leaf), sharding in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(shardings), strict=True):
        try:
            jax.device_put(leaf, sharding)
        except AssertionError:
            raise UserError(
                f"{path_name(path) or 'array'}: its values differ between the processes, or are NaN; allowed: the same"
                " values on each, which keeps its shards of them; make them with one seed, or read them from one file"
            ) from None
    raise  # the error that is being handled


def refuse_layouts(error: ValueError, trace: Callable[[], Any]) -> None:
    """Raise `UserError` if a step could not be compiled because code inside the manual region asks for a layout.

    jax says what is wrong with the axes of its mesh, and often not where.

    trace: gives the closed jaxpr of the step, if it can be traced
    """
    frames = list(_frames_of_user(error))
    found = _asked(frames[0]) if frames else []  # one further out called code of its own, which has failed
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if not is_installed(frame.filename)]
    if not frames:  # it was traced, and failed later
        asking = [site.equation for site in every_equation(trace()) if _asks(site.equation, site.inside)]
        found = [ASKING[equation.primitive.name] for equation in asking]
        places = list(map(line_of_user, asking))
    if not found and "mesh passed to shard_map" in str(error):  # the call is of a function that shard_map has made
        found = ["shard_map"]
    if found:
        raise UserError(
            f"{found[0]}: in a loss or a layer ({places[0] if places else 'of a package'}), where each device computes"
            " with its own part of the arrays; leave it out: mesh and strategy say how parameters and batches are laid"
            f" out; jax says: {str(error).partition(chr(10))[0]}"
        ) from error


def _asks(equation: Any, inside: tuple[Any, ...]) -> bool:
    """Whether an equation inside the manual region asks for a layout; one that names a memory does not."""
    if equation.primitive.name not in ASKING or not any(each.primitive.name == "shard_map" for each in inside):
        return False
    targets = equation.params.get("devices", (equation.params.get("sharding"),))
    return any(hasattr(target, "device_set") for target in targets)


def _frames_of_user(error: Exception) -> Iterator[traceback.FrameSummary]:
    """The frames inside the innermost one of jaxdist, the innermost first, without those of jax."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return
        if not path.is_relative_to(Path(jax.__file__).parent):
            yield frame


def _asked(frame: traceback.FrameSummary) -> list[str]:
    """What asks for a layout in the call that a frame was in: in its function and keywords, but not its arguments,
    which are there already. [] where it was in no call, as of an error that the user raises."""
    first, last = frame.lineno, frame.end_lineno
    if first is None or last is None or frame.colno is None or frame.end_colno is None:  # Python without debug ranges
        return []
    lines = [linecache.getline(frame.filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][: frame.end_colno]  # the first may be the last
    lines[0] = lines[0][frame.colno :]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:  # a statement
        return []
    if not isinstance(call, ast.Call):
        return []
    nodes = [*ast.walk(call.func), *call.keywords]
    names = [getattr(node, "id", getattr(node, "attr", "")) for node in nodes]
    keywords = [node for node in nodes if isinstance(node, ast.keyword) and ast.unparse(node.value) != "None"]
    return [name for name in names if name in _CALLED] + [str(each.arg) for each in keywords if each.arg in _KEYWORDS]
