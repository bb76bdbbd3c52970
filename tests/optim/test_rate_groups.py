"""Groups of `optimizer.groups`: each parameter moves as by an optimizer whose one rate and decay are those of its
group."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from levels import others_slow

from jaxdist import make_mesh, state_target
from jaxdist.build import assemble
from jaxdist.config.load import load_config, to_yaml
from jaxdist.config.sections.optimizer import GroupConfig, OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh
from jaxdist.optim.make import make_optimizer
from jaxdist.optim.patterns import fitting
from jaxdist.specs import leaves_by_name

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.3, clip_norm=0.0, schedule="linear")
GROUPS = (
    GroupConfig("embed.*", lr=0.02, decay=0.0),
    GroupConfig("blocks.2.kernel", decay=0.7),
    GroupConfig("blocks.[01].*", lr=0.3),
    GroupConfig("*.bias", decay=0.5),
)
# (name, row of the stack): (rate, decay)
WANTED: dict[tuple[str, int | None], tuple[float, float]] = {
    ("embed.table", None): (0.02, 0.0),
    ("head.kernel", None): (0.1, 0.3),
    ("head.bias", None): (0.1, 0.5),
    **{("blocks.kernel", row): (0.3, 0.3) for row in (0, 1)},
    ("blocks.kernel", 3): (0.1, 0.3),
    ("blocks.kernel", 2): (0.1, 0.7),
    **{("blocks.bias", row): (0.3, 0.0) for row in (0, 1)},
    **{("blocks.bias", row): (0.1, 0.5) for row in (2, 3)},
}


def tree(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    sizes = {"embed": {"table": (6, 4)}, "blocks": {"kernel": (4, 4, 4), "bias": (4, 4)}}
    sizes["head"] = {"kernel": (4, 6), "bias": (6,)}
    return jax.tree.map(lambda size: rng.normal(size=size), sizes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def moved(config: OptimizerConfig, order: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    """What three steps add to the parameters."""
    optimizer, params = make_optimizer(config, steps=5, order=order), tree(0)
    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for i in range(3):
            updates, state = optimizer.update(tree(1 + i), state, params)
            params = jax.tree.map(np.add, params, jax.device_get(updates))
    return leaves_by_name(jax.tree.map(np.subtract, params, tree(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(["adamw", "sgd", "lion", "muon"], "adamw"))
def test_each_group_moves_as_if_alone(name: str) -> None:
    config = replace(CONFIG, name=name)
    with jax.enable_x64(True):
        found = moved(replace(config, groups=GROUPS))
        swapped = moved(replace(config, groups=GROUPS), order=(3, 2, 1, 0))
        for (leaf, row), (rate, decay) in WANTED.items():
            one = replace(config, lr=rate, weight_decay=decay)
            decayed = replace(one, groups=(GroupConfig(decay=decay),)) if leaf.endswith("bias") and decay else one
            at = ... if row is None else row
            np.testing.assert_allclose(found[leaf][at], moved(decayed)[leaf][at], rtol=1e-6, atol=1e-7, err_msg=leaf)
        alone = moved(replace(config, lr=0.3))["blocks.bias"]
        np.testing.assert_allclose(swapped["blocks.bias"][[2, 3]], alone[[2, 3]], rtol=1e-6)  # they hold blocks 1 and 0
        assert not np.allclose(found["blocks.bias"][[2, 3]], alone[[2, 3]])


@pytest.mark.slow
def test_a_rate_of_0_leaves_some_blocks_as_they_are() -> None:
    stay, free = moved(replace(CONFIG, groups=(GroupConfig("blocks.[01].*", lr=0.0),))), moved(CONFIG)
    for name, leaf in stay.items():
        rows = slice(2 if name.startswith("blocks.") else 0, None)
        assert np.array_equal(leaf[rows], free[name][rows])
        assert not leaf[: rows.start].any() and (free[name] != 0).all()
    with pytest.raises(UserError, match=r"fits no parameter; .*give optimizer.groups \{match: blocks.0.\*, lr: 0\}"):
        fitting(tree(0), ("blocks.0.*",), key="optimizer.freeze")


def test_without_a_decay_of_their_own() -> None:
    """Adafactor reads parameters for more than decay; rates alone are any optimizer's."""
    config = replace(CONFIG, name="adafactor")
    with jax.enable_x64(True):
        found = moved(replace(config, groups=(GroupConfig("head.*", lr=0.05),)))
        np.testing.assert_allclose(found["head.kernel"], moved(replace(config, lr=0.05))["head.kernel"], rtol=1e-6)
        np.testing.assert_array_equal(found["embed.table"], moved(config)["embed.table"])


def test_state_is_that_of_the_optimizer_alone() -> None:
    with_them, without = (
        make_optimizer(each, steps=3).init(tree(0)) for each in (replace(CONFIG, groups=GROUPS[2:]), CONFIG)
    )
    assert jax.tree.structure(with_them) == jax.tree.structure(without)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"groups": (GroupConfig("blocsk.*"),)}, r"optimizer.groups\[0\].match: 'blocsk.\*' fits no trained parameter"),
        ({"groups": (GroupConfig(), GroupConfig("embed.*"))}, r"groups\[1\].match: 'embed.\*' fits no .* before it"),
        (
            {"groups": (GroupConfig(decay=0.1),), "name": "adafactor"},
            r"optimizer.groups\[0\].decay: 0.1, but .*adafactor",
        ),
    ],
)
def test_mistakes(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        optimizer = make_optimizer(replace(CONFIG, **config), steps=3)
        state_target(lambda key: jax.tree.map(lambda leaf: leaf.astype(np.float32), tree(0)), optimizer, make_mesh())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[{match: 'embed.*', rate: 1}]",
            r"optimizer.groups\[0\].rate: unknown key; keys of optimizer.groups\[0\]: match",
        ),
        ("[{mach: 'embed.*'}]", r"optimizer.groups\[0\].mach: unknown key; did you mean match\?"),
        (
            "[embed.*]",
            r"optimizer.groups\[0\]: 'embed.\*' is given where a section belongs; allowed: {match, lr, decay}",
        ),
        ("[{match: a, lr: -1}]", r"optimizer.groups\[0\].lr: -1.0 is out of range; allowed: a number >= 0, or null"),
        ("{match: a}", "optimizer.groups: a mapping is given where a list belongs; allowed: a list of sections"),
    ],
)
def test_mistakes_in_a_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"optimizer: {{groups: {text}}}\n")
    with pytest.raises(UserError, match="^" + message):
        load_config(tmp_path / "a.yaml")


def test_from_a_file_into_a_pipeline(tmp_path: Path) -> None:
    """There and back; and the rows of a pipeline are known by their blocks."""
    (tmp_path / "a.yaml").write_text(
        "model: {layers: 4, width: 16, heads: 4}\noptimizer: {groups: [{match: blocks.0.*, lr: 0.1}]}\n"
        "mesh: {pipe: 2}\nparallel: {schedule: interleaved, chunks: 2, microbatches: 2}\ndevices: {simulated: 2}\n"
    )
    config = load_config(tmp_path / "a.yaml", ["optimizer.groups=[{match: blocks.3.*, lr: 0.2}]"])
    assert config.optimizer.groups == (GroupConfig("blocks.3.*", lr=0.2),)
    (tmp_path / "b.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "b.yaml") == config
    parts = assemble(config, abstract_mesh(pipe=2))
    assert parts.order.tolist() == [0, 2, 1, 3]
