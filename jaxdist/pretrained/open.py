"""Find out what a place is that parameters are to come from, and open it."""

from pathlib import Path

from jaxdist.checkpoint.huggingface.family import CONFIG
from jaxdist.checkpoint.reader import FOLDER, is_complete
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path
from jaxdist.pretrained.flat import Flat
from jaxdist.pretrained.folder import Folder
from jaxdist.pretrained.saved import Saved
from jaxdist.pretrained.source import Pretrained

_ALLOWED = "a run directory, a folder of checkpoints or of one step, a Hugging Face folder, or a .safetensors file"


def open_pretrained(where: str | Path, *, key: str = "where", ema: bool = False) -> Pretrained:
    """Open parameters that exist already, to be loaded into any layout. Use the result as a context.

    - where: a run directory, as of `fit`, or the folder of a `Checkpoints` (the newest step of these); the folder of a
      step; a Hugging Face folder; or a safetensors file with our names of parameters.
    - key: what messages name, such as the key of a configuration.
    - ema: the moving average of a run in place of its parameters.

    Raises `UserError`, in one line, for a place that is nothing of these, is damaged, or has no average.

    >>> from safetensors.numpy import save_file
    >>> import tempfile
    >>> file = f"{tempfile.mkdtemp()}/some.safetensors"
    >>> save_file({"w": np.ones((16, 4), np.float32)}, file)
    >>> make = lambda key: {"w": jnp.zeros((16, 4))}
    >>> target = jaxdist.state_target(make, optax.sgd(0.1), jaxdist.make_mesh(fsdp=8), strategy="zero3")
    >>> with jaxdist.open_pretrained(file) as found:
    ...     params = found.load(target, say=lambda line: None)
    >>> params["w"].sharding == target.params["w"].sharding
    True
    """
    path = user_path(where, key=key)
    if path.is_file() and path.suffix == ".safetensors":
        found: Pretrained = Flat(path, key=key)
    elif is_complete(path) or (path / FOLDER).is_dir() or (path.is_dir() and any(map(is_complete, path.iterdir()))):
        return Saved(path, key=key, ema=ema)
    elif (path / CONFIG).is_file():
        found = Folder(path, key=key)
    else:
        said = "is none of what is allowed" if path.exists() else "does not exist"
        raise UserError(f"{key}: {str(where)!r} {said}; allowed: {_ALLOWED}")
    if ema:
        found.close()
        raise UserError(f"{key}: {str(where)!r} keeps no moving average; allowed: a run with train.ema, or no ema")
    return found
