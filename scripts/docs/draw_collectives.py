"""Draw the rounds of every hand-written algorithm on 4 devices: `python scripts/docs/draw_collectives.py [OUT_DIR]`.

The messages are read from the traced programs. OUT_DIR: docs/pictures unless given.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxdist import collectives, registry
from jaxdist.plan.report.draw_rounds import draw_rounds
from jaxdist.plan.traced.rounds import rounds_of

DEVICES = 4
SIZE = 16384  # elements: enough for `ordered` to halve, and one piece for each tree of `double_tree`
LEFT_OUT = ("native", "auto")  # the library's rounds; another's rounds
MORE = [("broadcast", "tree"), ("reduce", "tree")]


def picture(operation: str, algorithm: str) -> str:
    """One algorithm's rounds, as SVG."""
    mesh = {"data": 2, "fsdp": 2} if algorithm == "two_level" else {"data": DEVICES}
    shape = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    rounds = rounds_of(
        lambda x: getattr(collectives, operation)(x, tuple(mesh), algorithm=algorithm),
        shape,
        mesh=mesh,
        ports=2 if algorithm == "bidirectional_ring" else 1,
    )
    inner = 2 if algorithm == "two_level" else None
    title = f"{operation} by {algorithm}, {DEVICES} devices with N bytes each"
    return draw_rounds(rounds, DEVICES, whole=SIZE * 4, title=title, inner=inner)


def main(folder: Path) -> None:
    """Write all pictures."""
    names = [name for name in registry.names("jaxdist.collectives.algorithms") if name not in LEFT_OUT]
    folder.mkdir(parents=True, exist_ok=True)
    for operation, algorithm in [*(("all_reduce", name) for name in names), *MORE]:
        path = folder / f"{operation}_{algorithm}.svg"
        path.write_text(picture(operation, algorithm), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "pictures")
