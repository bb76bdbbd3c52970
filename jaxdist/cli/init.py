"""The command `init`: a project of one's own, which trains as it is."""

from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.shipped import shipped_folder, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

_DESCRIPTION = """Write a project into a new folder: a configuration, a small model of Flax NNX layers, a README, a
recipe for SLURM, and a .gitignore."""
_EXAMPLES = ("jaxdist init my-project && cd my-project && jaxdist train config.yaml", "jaxdist init .")
SCRIPT_LINE = 'python scripts/train.py --config "${CONFIG:-configs/quickstart.yaml}"'  # of the recipe that is shipped


def project_files() -> dict[str, str]:
    """The files of a project: names and texts."""
    folder = shipped_folder()
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "project").glob("*.*"))}
    recipe = (folder / "launch" / "slurm_gpu.sbatch").read_text(encoding="utf-8")
    assert SCRIPT_LINE in recipe
    recipe = recipe.replace(SCRIPT_LINE, 'jaxdist train "${CONFIG:-config.yaml}"')
    recipe = recipe.replace(" mesh.data=-1", "")  # the project's mesh is all devices already
    recipe = recipe.replace("From the checkout, with its", "From this folder, with its")
    recipe = recipe.replace("configs/launch/slurm_gpu.sbatch", "slurm.sbatch").replace(
        "with slurm_node.sbatch, with ", ""
    )
    return files | {"slurm.sbatch": recipe, ".gitignore": "runs/\n__pycache__/\nslurm-*.out\n"}


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist init") -> int:
    """Exit status: 0 done, 2 the folder is in use or cannot be written."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION, **with_examples(_EXAMPLES))
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new, or empty")
    folder = parser.parse_args(argv).folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"folder: {folder} exists and is not empty; allowed: a new or an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in project_files().items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"folder: {folder}: {error.strerror}; allowed: a folder that can be written") from error
    print(f"wrote {', '.join(project_files())} to {folder}\n\n  cd {folder}\n  jaxdist train config.yaml")
    return 0
