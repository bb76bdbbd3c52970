"""Draw every pipeline schedule for 4 stages and 8 microbatches: `python scripts/docs/draw_pipelines.py [OUT_DIR]`.

The tables are those that run. OUT_DIR: docs/pictures unless given.
"""

import sys
from pathlib import Path

from jaxdist import registry
from jaxdist.parallel.pipeline.table import SCHEDULES, table_of
from jaxdist.plan.report.draw_timeline import draw_timeline

STAGES, MICROBATCHES = 4, 8
CHUNKS = {"interleaved": 2}  # others cannot cut their stages


def main(folder: Path) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in registry.names(SCHEDULES):
        table = table_of(name)
        if table is not None:
            path = folder / f"pipeline_{name}.svg"
            draw_timeline(table(STAGES, MICROBATCHES, CHUNKS.get(name, 1)), path, name=name)
            print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "pictures")
