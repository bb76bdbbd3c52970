"""Draw which positions a device has, and the rounds of a ring: `python scripts/docs/draw_context.py [OUT_DIR]`.

OUT_DIR: docs/pictures unless given.
"""

import sys
from pathlib import Path

from jaxdist.plan.report.draw_context import draw_context


def main(folder: Path) -> None:
    """Write the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "context.svg"
    path.write_text(draw_context(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "pictures")
