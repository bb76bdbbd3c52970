"""Global batches of a Python object that gives whole batches: indexable, or iterable."""

import base64
import importlib
import inspect
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.config.rules.batch import check_rows
from jaxdist.data.loader import GlobalBatches
from jaxdist.data.samples import as_dtype
from jaxdist.errors import UserError
from jaxdist.jaxpr.layouts import refuse_leaf
from jaxdist.processes import from_all
from jaxdist.specs import PyTree, leaves_by_name, spec_axes

_END = object()
_STATE = (("state_dict", "load_state_dict"), ("get_state", "set_state"))  # of torchdata and datasets; of grain


class Placing:
    """Makes global arrays of host batches, and checks that these are alike.

    - sharding: of every leaf; it splits dim 0.
    - parts: what the rows of a global batch must divide into, as `check_rows` names it.
    - key: what messages call the data.
    """

    def __init__(self, sharding: NamedSharding, parts: Mapping[str, int], key: str) -> None:
        self._sharding, self._parts, self._key = sharding, parts, key
        self._first: dict[str, str] | None = None  # the leaves of the first batch
        shards = math.prod(sharding.mesh.shape[axis] for axis in spec_axes(sharding.spec))
        own = {index[0].start for index in sharding.addressable_devices_indices_map((shards,)).values()}  # type: ignore[index]
        self._copies = shards // len(own)  # how many times the rows of this process a global batch has

    def host(self, batch: Any, number: int) -> PyTree:
        """The batch with NumPy arrays, copied. Global arrays stay. Raises `UserError`."""
        where = f"{self._key}: batch {number}"
        named = leaves_by_name(batch)
        if not named:
            raise UserError(f"{where} is a {type(batch).__name__} without arrays; give a tree of arrays [rows, ...]")
        arrays = {name: self._array(leaf, f"{where}: {name}".removesuffix(": ")) for name, leaf in named.items()}
        kinds = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()}
        if self._first is None:
            self._check_rows(arrays, where)
            self._first = kinds
        if kinds != self._first:
            name = next(each for each in [*kinds, *self._first] if kinds.get(each) != self._first.get(each))
            raise UserError(
                f"{where}: {name or 'the array'} is {kinds.get(name, 'missing')}, and was"
                f" {self._first.get(name, 'missing')} in the first; give all batches one shape: leave out the last of"
                " an epoch (drop_last=True), or fill it up with rows of weight 0"
            )
        return jax.tree.unflatten(jax.tree.structure(batch), list(arrays.values()))

    def place(self, batch: PyTree) -> PyTree:
        """Global arrays of a batch by `host`."""
        with jax.transfer_guard_host_to_device("allow"):  # the guard takes this for a transfer by accident
            return jax.tree.map(self._put, batch)

    def _put(self, leaf: Any) -> jax.Array:
        return leaf if isinstance(leaf, jax.Array) else jax.make_array_from_process_local_data(self._sharding, leaf)

    def _array(self, leaf: Any, where: str) -> Any:
        if isinstance(leaf, jax.Array) and leaf.ndim and leaf.sharding.is_equivalent_to(self._sharding, leaf.ndim):
            return leaf
        array = np.asarray(_of_tensor(leaf) if hasattr(leaf, "numpy") else leaf)
        if not array.ndim or not (jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
            kind = "one number" if hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
            refuse_leaf(where, f"an array of {array.dtype}" if array.ndim else kind)
        dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))  # files may have the other one
        return np.array(as_dtype(array, dtype, where=where))  # a copy: a generator may use its arrays again

    def _check_rows(self, arrays: Mapping[str, Any], where: str) -> None:
        counts = {
            name: leaf.shape[0] // (self._copies if isinstance(leaf, jax.Array) else 1) for name, leaf in arrays.items()
        }
        rows = next(iter(counts.values()))
        for name, count in counts.items():
            if count != rows:
                raise UserError(f"{where}: {name} has {count} rows, and {next(iter(counts))} has {rows}; give as many")
        if len(set(every := from_all(rows))) > 1:
            raise UserError(f"{where} has {', '.join(map(str, every))} rows in the processes; give as many in each")
        check_rows(rows * self._copies, self._parts, where)


class OwnBatches:
    """The batches of a run by their numbers from 0, of `data` as `jaxdist.fit` describes it.

    Numbers are asked for in rising order, the last `keep` of them again. Raises `UserError`: no batches, other shapes.

    - placing: makes global arrays of them.
    - first: the number of the first batch that is asked for; the ones before are passed over.
    - position: of `position`, in place of passing over.
    """

    def __init__(
        self, data: Any, placing: Placing, *, first: int = 0, position: list[Any] | None = None, keep: int = 8
    ) -> None:
        self._placing, self._keep, self._next = placing, keep, first
        self._recent = OrderedDict[int, tuple[PyTree, Any]]()
        self._indexed, self._given = indexed(data), None
        if self._indexed is not None and not isinstance(data, GlobalBatches):
            if len(set(counts := from_all(len(data)))) > 1:
                said = ", ".join(map(str, counts))
                raise UserError(f"data: has {said} batches in the processes; give as many in each")
        if self._indexed is None:
            if first and inspect.isgenerator(data) and inspect.getgeneratorstate(data) != inspect.GEN_CREATED:
                raise UserError(
                    f"data: a generator that was read already, and the run goes on after {first} batches, which are"
                    " passed over; give a new one, or a function that makes it"
                )
            self._given = _Iterated(data, _own(position, "data"))
            for _ in range(first if position is None else 0):
                self._given.take()

    def batch(self, number: int) -> PyTree:
        """The global batch of this number."""
        if self._indexed is not None:
            return self._placing.place(self._placing.host(self._indexed(number), number))
        while self._next <= number:
            assert self._given is not None
            batch = self._placing.host(self._given.take(), self._next)
            self._recent[self._next] = batch, self._given.position()
            self._next += 1
            if len(self._recent) > self._keep:
                self._recent.popitem(last=False)
        return self._placing.place(self._recent[number][0])

    def position(self, taken: int) -> list[Any] | None:
        """Where each process is after so many batches, as JSON; None: the number says it. For all processes."""
        if self._given is None or not self._given.has_state:
            return None
        return from_all(self._recent[taken - 1][1])


def _of_tensor(tensor: Any) -> Any:
    """An array of a tensor of torch, or of what else has a method `numpy`."""
    if hasattr(tensor, "detach"):  # from its gradient; it may be on a GPU
        tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, which NumPy itself has not
        return jax.dlpack.from_dlpack(tensor)


def indexed(data: Any, key: str = "data") -> Callable[[int], Any] | None:
    """The number of a batch -> the batch, of data that has an index: endless epochs in the same order. Else None."""
    if isinstance(data, GlobalBatches):
        return data.batch if data.batches is None else lambda number: data.batch(number % (data.batches or 1))
    if isinstance(data, Mapping | np.ndarray | jax.Array):
        raise UserError(f"{key}: is one batch, a {type(data).__name__}; give an iterable of batches, such as [batch]")
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):  # streams of datasets have columns by index
        if not hasattr(data, "__iter__") and not callable(data):
            raise UserError(f"{key}: is a {type(data).__name__}, which gives no batches; give an iterable of batches")
        return None
    if not len(data):
        raise UserError(f"{key}: is empty; give at least one batch")
    if isinstance(data, tuple | list) and all(isinstance(each, np.ndarray | jax.Array) for each in data):
        if len({(each.ndim, each.dtype) for each in data}) > 1:  # as (images, labels)
            kind = type(data).__name__
            raise UserError(
                f"{key}: looks like one batch, a {kind} of arrays of different kinds; give an iterable of batches, such"
                " as [batch]"
            )
    return lambda number: data[number % len(data)]


def one_pass(data: Any) -> Iterator[Any]:
    """The batches of one epoch."""
    if isinstance(data, GlobalBatches):
        return map(data.batch, range(data.batches or 0))
    if hasattr(data, "__iter__"):
        return iter(data)
    if callable(data):
        return one_pass(data())
    return (data[number] for number in range(len(data)))  # `iter` would go on to an IndexError, which may never come


def as_many(batches: Iterator[Any], key: str) -> Iterator[Any]:
    """The batches of one epoch. Raises `UserError` on all processes unless each has as many."""
    for number in itertools.count():
        batch = next(batches, _END)
        if len(set(from_all(batch is _END))) > 1:
            counts = from_all(number + (batch is not _END) + sum(1 for _ in batches))
            raise UserError(
                f"{key}: gives {', '.join(map(str, counts))} batches in the processes; give as many in each"
            )
        if batch is _END:
            return
        yield batch


class _Iterated:
    """Endless epochs of an iterable. position: to go on from, of `position`."""

    def __init__(self, data: Any, position: Any) -> None:
        self._data, self._taken = data, 0
        self._epoch = 0 if position is None else position["epoch"]
        self._begin(None if position is None else _decoded(position["state"]))

    def _begin(self, state: Any = None) -> None:
        told: list[Any] = [self._data, getattr(self._data, "sampler", None)]
        for each in told:
            if hasattr(each, "set_epoch"):
                each.set_epoch(self._epoch)
        own = _methods(self._data)
        if own and state is not None:
            own[1](state)
        self._rest = one_pass(self._data)
        if own is None:
            own = _methods(self._rest)
            if own and state is not None:
                own[1](state)
        self._get = own and own[0]
        self.has_state = own is not None

    def take(self) -> Any:
        """The next batch."""
        for _ in range(2):
            if (batch := next(self._rest, _END)) is not _END:
                self._taken += 1
                return batch
            self._epoch += 1
            self._begin()  # a loader may give the same iterator again, which begins anew
        if self._taken:
            raise UserError(
                f"data: ended after {self._taken} batches; give more, or what can be read again: a list, or the"
                " function that makes the generator"
            )
        raise UserError("data: gives no batches; give an iterable that does")

    def position(self) -> Any:
        """The place after the batch that was taken last; None where the data do not tell theirs."""
        return None if self._get is None else {"epoch": self._epoch, "state": _encoded(self._get())}


def _methods(source: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    for names in _STATE:
        found = [getattr(source, name, None) for name in names]
        if all(map(callable, found)):
            return found[0], found[1]  # type: ignore[return-value]
    return None


def _own(position: list[Any] | None, key: str) -> Any:
    """This process's part of what all have saved."""
    if position is None:
        return None
    if len(position) != jax.process_count():
        raise UserError(
            f"{key}: its position was saved by {len(position)} processes, and there are {jax.process_count()}; start as"
            " many, or give data with an index, which any number of processes can go on with"
        )
    return position[jax.process_index()]


def _encoded(value: Any) -> Any:
    """A state of data as JSON: bytes, arrays and tensors are marked."""
    if isinstance(value, Mapping):
        return {"pairs": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_encoded(each) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if hasattr(value, "numpy") or isinstance(value, np.ndarray | np.generic):
        array = np.asarray(_of_tensor(value) if hasattr(value, "numpy") else value)
        if array.dtype.kind not in "OV":  # pointers; records, and types that NumPy has not, as bfloat16
            raw = base64.b64encode(array.tobytes()).decode()
            return {"tensor" if hasattr(value, "numpy") else "array": [array.dtype.str, list(array.shape), raw]}
        value = array
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = f"{type(value).__name__}{f' of {value.dtype}' if isinstance(value, np.ndarray) else ''}"
    raise UserError(
        f"data: its state holds a {kind}; allowed: numbers, texts, bytes, arrays of these, and lists and dicts of these"
    )


def _decoded(value: Any) -> Any:
    """The state that `_encoded` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "pairs":
        return {_decoded(key): _decoded(each) for key, each in content}
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](map(_decoded, content))
    if kind == "bytes":
        return base64.b64decode(content)
    dtype, shape, raw = content
    array = np.frombuffer(base64.b64decode(raw), np.dtype(dtype)).reshape(shape).copy()
    return importlib.import_module("torch").from_numpy(array) if kind == "tensor" else array
