"""Draw the phases of DataParallel and of its balanced form: `python scripts/docs/draw_data_parallel.py [OUT_DIR]`.

Who sends to whom is read from the closed forms that the tests compare with counts. OUT_DIR: docs/pictures unless given.
"""

import sys
from pathlib import Path

from jaxdist.lab.data_parallel.picture import draw_phases


def main(folder: Path) -> None:
    """Write the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dataparallel.svg"
    path.write_text(draw_phases(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "pictures")
