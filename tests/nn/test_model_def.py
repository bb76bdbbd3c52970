"""What `model_def` makes of a module of stock NNX layers, and what it says of one that it cannot take."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import picture_model
import pytest
from flax import nnx

from jaxdist.config.load import load_config
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.nn import model_def
from jaxdist.step import make_train_step
from jaxdist.trainer.train import train

CPU = "devices.platform=cpu"


class Part(nnx.Module):
    """An embedding, a block or a head of a model that is only made, and what else it holds."""

    def __init__(self, rngs: nnx.Rngs, held: Any = None, width: int = 4) -> None:
        self.inner, self.held = nnx.Linear(4, width, rngs=rngs), held

    def __call__(self, x: Any, *given: Any) -> Any:
        return self.inner(x)


def model(*, without: str = "", **held: Callable[[nnx.Rngs, Any], Any]) -> Callable[[nnx.Rngs], nnx.Module]:
    """A function that makes a model: each part holds what `held` gives it."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = Part(rngs)
            self.blocks = nnx.List([Part(rngs), Part(rngs)])
            self.head = Part(rngs)
            for name, make in held.items():
                setattr(self, name, make(rngs, self))
            if without:
                delattr(self, without)

    return Model


class ByKeyword(nnx.Module):
    """As Flax's own layers are made."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = Part(rngs)


class TakesRows(Part):
    """A block that reads rows of the batch."""

    def __call__(self, h: Any, keys_B: Any, rows: Any) -> Any:
        return self.inner(h)


class TakesNone(Part):
    """A block or a head that reads nothing besides h and the second argument."""

    def __call__(self, h: Any, second: Any) -> Any:
        return self.inner(h)


class Plain(nnx.Module):
    """A block without parameters."""

    def __call__(self, h: Any, keys_B: Any) -> Any:
        return h


class Uncallable(nnx.Module):
    """A module without __call__."""


class Keywords(nnx.Module):
    """It takes its streams by keyword, as Flax's own layers do."""

    def __init__(self, *, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = Part(rngs)


def blocks(*held: Callable[[nnx.Rngs], Any]) -> Callable[[nnx.Rngs], nnx.Module]:
    return model(blocks=lambda rngs, _: nnx.List([Part(rngs, make(rngs)) for make in held]))


ARRAY = r"is an array\. A model holds no arrays but its parameters: .* compute it in __call__"
MISTAKES: dict[str, tuple[Any, str]] = {
    "no embed": (model(without="embed"), r"Model has no attribute embed; .*embed\(batch, keys\) -> h"),
    "no blocks": (model(without="blocks"), r"no attribute blocks; .*: an nnx\.List .*block\(h, keys\) -> h"),
    "no head": (model(without="head"), r"no attribute head; .*head\(h, batch, embed or None\) -> \(loss sum"),
    "one block": (model(blocks=lambda rngs, _: Part(rngs)), r"Model\.blocks, a Part, does not fit; allowed: blocks"),
    "no block": (model(blocks=lambda *_: nnx.List([])), r"Model\.blocks, a List, does not fit; .* one or more"),
    "an array": (model(head=lambda *_: nnx.Param(jnp.ones(2))), r"Model\.head, a Param, does not fit; allowed: head"),
    "instance": (ByKeyword(rngs=nnx.Rngs(0)), r"ByKeyword that is made already; .*model_def\(lambda rngs: By"),
    "keyword": (ByKeyword, r"one argument, an nnx\.Rngs \(.*lambda rngs: ByKeyword\(\.\.\., rngs=rngs"),
    "nothing": (None, r"one argument, an nnx\.Rngs \(None is not a callable object\); give a function"),
    "dropout": (
        blocks(*[lambda rngs: nnx.Dropout(0.1, rngs=rngs)] * 2),
        r"blocks\.0\.held \(Dropout\) holds random state.*use jaxdist\.nn\.dropout\(h, keys, site=1, rate=0\.1\)",
    ),
    "attention": (
        blocks(*[lambda rngs: nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, rngs=rngs)] * 2),
        r"blocks\.0\.held \(MultiHeadAttention\) holds random state.*use jaxdist\.nn\.dropout",
    ),
    "batch norm": (
        blocks(*[lambda rngs: nnx.BatchNorm(4, rngs=rngs)] * 2),
        r"blocks\.0\.held \(BatchNorm\) holds a BatchStat, state that is no nnx\.Param; use .* such as nnx\.LayerNorm",
    ),
    "tied by hand": (model(head=lambda rngs, own: Part(rngs, own.embed)), r"embed and head share .*, tied=True\)"),
    "one block twice": (
        model(blocks=lambda rngs, own: nnx.List([own.embed, own.embed])),
        r"embed and blocks\[0\] share a parameter, .*; make one for each",
    ),
    "outside": (model(norm=lambda rngs, _: nnx.LayerNorm(4, rngs=rngs)), r"parameter norm\.\w+ is in none of embed, b"),
    "unlike": (blocks(lambda _: None, lambda rngs: nnx.LayerNorm(4, rngs=rngs)), r"blocks must be uniform \(same"),
    "unlike shapes": (
        model(blocks=lambda rngs, _: nnx.List([Part(rngs, width=4), Part(rngs, width=8)])),
        r"blocks must be uniform \(same module, same options, same shapes\)",
    ),
    "partial": (functools.partial(Keywords, layers=2), r"one argument, an nnx\.Rngs \(.*lambda rngs: Keywords\("),
    "numpy": (blocks(*[lambda _: np.ones(3)] * 2), rf"blocks\.0\.held {ARRAY}"),
    "computed": (blocks(*[lambda _: jnp.cos(jnp.arange(3.0))] * 2), rf"blocks\.0\.held {ARRAY}"),
    "a dict of them": (blocks(*[lambda _: {"a": jnp.arange(3.0) + 1}] * 2), rf"blocks\.0\.held\.a {ARRAY}"),
    "a list of them": (blocks(*[lambda _: nnx.List([jnp.arange(3.0)])] * 2), rf"blocks\.0\.held\.0 {ARRAY}"),
    "a plain list": (blocks(*[lambda _: [np.ones(3)]] * 2), r"static attribute 'held' of .* A model holds no arrays"),
    "complex": (
        blocks(*[lambda _: nnx.Param(jnp.ones(3, complex))] * 2),
        r"parameter blocks\[0\]\.held is complex64; allowed: floats; make two parameters of floats, .*lax\.complex\(",
    ),
    "integers": (
        model(head=lambda rngs, _: Part(rngs, nnx.Param(jnp.arange(3)))),
        r"parameter head\.held is int32; allowed: floats; keep integers and bools as numbers in a tuple, and make the",
    ),
    "no parameter": (
        model(blocks=lambda *_: nnx.List([Plain(), Plain()])),
        r"blocks have no parameter, .*; allowed: one or more; put what has none into the embedding or the head",
    ),
    "takes rows": (model(blocks=lambda rngs, _: nnx.List([TakesRows(rngs)])),
        r"TakesRows of blocks is called with \(h, keys\), .*rows.*; or for more give model_def\(\.\.\., rows=lambda"),
    "a head of two": (model(head=lambda rngs, _: TakesNone(rngs)),
        r"TakesNone of head is called with \(h, batch, embed\), .* write def __call__\(self, h, batch, embed\)$"),
    "no call": (model(head=lambda *_: Uncallable()), r"Uncallable of head .* not a callable object\); write"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_module_that_cannot_be_taken_is_one_line(build: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        model_def(build)
    assert str(error.value).startswith("model_def: ") and "\n" not in str(error.value)


def test_a_block_that_takes_no_rows_is_one_line() -> None:
    said = (
        r"TakesNone of blocks is called with \(h, keys, rows\), .*__call__\(self, h, keys, rows\); or leave model_def's"
    )
    with pytest.raises(UserError, match=said):
        model_def(model(blocks=lambda rngs, _: nnx.List([TakesNone(rngs)])), rows=lambda batch: batch["mask"])


def test_a_leaf_that_the_batch_lacks_is_one_line() -> None:
    """Whoever reads it. Keys of something else stay what they are."""

    class Reads(Part):
        def __call__(self, *given: Any) -> Any:
            return next(each for each in given if isinstance(each, dict))["mask"]

    parts = {name: lambda rngs, _: Reads(rngs) for name in ("embed", "head")}
    made = model_def(model(**parts), rows=lambda batch: batch["mask"])
    params, batch = made.init(jax.random.key(0)), {"inputs": 0, "keys": 0}
    said = r": reads batch\['mask'\], which the batch does not have; it has inputs; read one of these"
    with pytest.raises(UserError, match=r"^rows of Model" + said):
        made.read_by_blocks(batch)
    with pytest.raises(UserError, match=r"^Reads" + said):
        made.embed(params["embed"], batch, None)
    with pytest.raises(UserError, match=r"^Reads" + said):
        made.head(params["head"], None, None, batch)
    with pytest.raises(KeyError, match="inputs"):
        model_def(model(), rows=lambda batch: {}["inputs"]).read_by_blocks(batch)


@pytest.mark.parametrize(
    "returned", [lambda losses: losses.mean(), lambda losses: (losses.sum(), 2, {}), lambda losses: (losses, 2)]
)
def test_a_head_that_returns_other_than_two_sums_is_one_line(returned: Callable[[jax.Array], Any]) -> None:
    class Head(Part):
        def __call__(self, h: Any, *given: Any) -> Any:
            return returned(jnp.zeros(2))

    made = model_def(model(head=lambda rngs, _: Head(rngs)))
    with pytest.raises(
        UserError, match=r"^Head: a head must return two scalars, \(loss sum, weight sum\).* it returned "
    ):
        made.head(made.init(jax.random.key(0))["head"], None, jnp.zeros((2, 4)), {})


def test_a_block_may_keep_modules_and_parameters_in_a_dict() -> None:
    held = lambda rngs: nnx.data({"a": nnx.Linear(4, 4, rngs=rngs), "b": nnx.Param(jnp.ones(3))})  # noqa: E731
    made = model_def(blocks(held, held))
    shapes = jax.tree.map(jnp.shape, made.init(jax.random.key(0))["blocks"])
    assert shapes["held"] == {"a": {"bias": (2, 4), "kernel": (2, 4, 4)}, "b": (2, 3)}


def test_dropout_that_gets_its_keys_is_taken() -> None:
    assert model_def(blocks(*[lambda _: nnx.Dropout(0.1)] * 2)).layers == 2


def test_a_head_without_logits_says_what_sampling_needs() -> None:
    made = model_def(model())
    params = made.init(jax.random.key(0))
    with pytest.raises(
        UserError, match=r"Part has no method logits\(h, embed or None\) .*, which sampling needs; write"
    ):
        made.logits(params["head"], None, np.zeros((2, 4)))


UNSAMPLED = """
from own_blocks import GPT, Block, Head
from flax import nnx
from jaxdist import model_def

class Masked(Block):
    def __call__(self, h, keys, rows):
        return super().__call__(h, keys)

class NoLogits(nnx.Module):
    def __init__(self, head):
        self.inner = head

    def __call__(self, h, batch, embed):
        return self.inner(h, batch, embed)

class Scored(GPT):
    def __init__(self, rngs, **sizes):
        super().__init__(rngs, **sizes)
        self.head = NoLogits(self.head)

def masked(config, *, max_length, param_dtype):
    return model_def(lambda rngs: GPT(rngs, Masked, length=max_length), tied=True, rows=lambda batch: batch["weights"])

def scored(config, *, max_length, param_dtype):
    return model_def(lambda rngs: Scored(rngs, length=max_length), tied=True)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("masked", r"rows of GPT: reads batch\['weights'\], which the batch does not have; it has inputs; "),
        pytest.param("scored", r"NoLogits has no method logits\(h, embed or None\)", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_cannot_be_sampled_from_is_refused_before_it_trains(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unsampled.py").write_text(UNSAMPLED)
    (tmp_path / "text.py").write_text("x = 1\n" * 2000)
    monkeypatch.syspath_prepend(child.ROOT / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    for module in ("unsampled", "own_blocks"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {{name: unsampled.{name}, layers: 4}}\nparallel: {{strategy: ddp}}\nobserve: {{report: false}}"
    )
    data = ("data.path=text.py", "data.seq_len=8", "data.global_batch=8", "mesh.data=8", "checkpoint.every=0")
    config = load_config(path, [CPU, *data, "devices.compilation_cache=false"])
    asked = rf"^train\.sample_tokens: 200, .* batches of inputs alone: {said}.*; or set train\.sample_tokens=0$"
    with jax.numpy_dtype_promotion("standard"), pytest.raises(UserError, match=asked):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


STOCK = model_def(lambda rngs: picture_model.Classifier(ModelConfig(width=8, layers=2), rngs), tied=False)


def test_an_axis_that_no_layer_uses_is_refused() -> None:
    """When a step is made: each device of `tensor` would compute the same."""
    said = r"mesh\.tensor: 2 is given, but no layer of the model is split over .* allowed: 1; use data or fsdp .*Column"
    with pytest.raises(UserError, match=said):
        make_train_step(STOCK, optax.sgd(0.1), make_mesh(data=2, tensor=2))
    with pytest.raises(UserError, match=r"mesh\.context: 2 .* allowed: 1; use data or fsdp instead, or model.name=gpt"):
        make_train_step(STOCK, optax.sgd(0.1), make_mesh(context=2))


def test_it_is_refused_from_a_configuration(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the data are read, and without a run directory."""
    path = tmp_path / "config.yaml"
    path.write_text("model: {name: picture_model.classifier, width: 8, layers: 2}\nobserve: {report: false}\n")
    with pytest.raises(
        UserError, match=r"mesh\.context: 2 .* no attention of model picture_model\.classifier is split"
    ):
        load_config(path, [CPU, "mesh.context=2", "mesh.data=16"])  # 8 devices: no mesh with context is proposed
    config = load_config(path, [CPU, "mesh.tensor=2", "mesh.data=4", "devices.compilation_cache=false"])
    monkeypatch.setattr("jaxdist.trainer.run.load_data", lambda config: pytest.fail("the data are read"))
    with pytest.raises(UserError, match=r"mesh\.tensor: 2 is given, but no layer of the model is split over this axis"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
