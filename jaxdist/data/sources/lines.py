"""Lines of Python files with their kinds, for classification: code, comment, docstring. Legend: n lines, S seq_len."""

import ast
import io
import tokenize
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.files import left_out
from jaxdist.data.samples import Samples
from jaxdist.data.source import Source, Yardstick, fingerprint, held_out_files, source_info
from jaxdist.data.sources._arrays import majority
from jaxdist.data.sources.text import contents_of
from jaxdist.errors import UserError

FACTS = SourceFacts(
    reads_files=True,
    words=("stdlib",),
    path="an existing folder of Python files, or stdlib",
    val_path="",
    ids=False,
    leaves=("inputs", "attention_mask", "label"),
)
KINDS = ("code", "comment", "docstring")  # by label
MOST = 20_000, 10_000  # lines that the bag of words is fitted to, and tested on

Line = tuple[bytes, int]


class _Lines(NamedTuple):
    """ids: uint8 [n, S], 0 after the end. length: int32 [n], at most S. label: int32 [n]."""

    ids: np.ndarray
    length: np.ndarray
    label: np.ndarray


def lines(config: DataConfig) -> Source:
    """Samples: inputs int32 [S], the bytes of a line; attention_mask int32 [S], 0 for the zeros after its end; label.

    The lines are those of `data.files` of the Python files of `data.path` (as for the source `text`), read by Python's
    own `ast` and `tokenize`: label 0 is code, 1 a comment that has the line to itself, 2 a line of a docstring. Blank
    lines are left out, spaces at the end too; a line longer than `data.seq_len` loses its end. Kinds are as frequent as
    they are in the files. Files are held out as for `text`, without the lines whose bytes (up to `data.seq_len`) are
    also among those to train on.

    Raises `UserError`: as `text`; fewer than two Python files; a file that this Python cannot parse.
    """
    found, binary = contents_of(config)
    contents = {name: content for name, content in found.items() if name.endswith(".py")}
    if len(contents) < 2:
        raise UserError(f"data.path: {config.path!r} holds {len(contents)} Python files (.py); allowed: 2 or more")
    names = list(contents)
    most = len(names) if config.files is None else min(config.files, len(names))
    names = [names[i * len(names) // most] for i in range(most)]
    sides: tuple[list[Line], list[Line]] = ([], [])
    held = held_out_files(names, config.held_out)
    for name, out in zip(names, held, strict=True):
        sides[out].extend(kinds_of_lines(contents[name], name))
    seen = {line[: config.seq_len] for line, _ in sides[0]}
    sides = sides[0], [each for each in sides[1] if each[0][: config.seq_len] not in seen]
    for side, what in zip(sides, ("to train on", "held out that are not among those to train on"), strict=True):
        if not side:
            raise UserError(f"data.path: {config.path!r} gives no lines {what}; give files with more text")
    train, held_out = (_table(side, config.seq_len) for side in sides)
    digest = fingerprint((name, len(contents[name]), [contents[name]]) for name in names)
    sizes, files = (len(train.label), len(held_out.label)), (len(names) - sum(held), sum(held))
    whole = "files; give more files of like size"
    info = source_info(config, "lines", "lines", sizes=sizes, files=files, sha256=digest, whole=whole)
    if unread := left_out(sum(name.endswith(".py") for name in binary)):  # others are not read anyway
        info["lines"] = [*unread, *info.get("lines", ())]
    yardstick = Yardstick("of held-out lines right", lambda: _simple_methods(train, held_out))
    return Source(_samples(train), _samples(held_out), 256, info, yardstick=yardstick, labels=len(KINDS))


def kinds_of_lines(content: bytes, name: str) -> list[Line]:
    """The lines of a Python file that are not blank, with their labels. name: of the file, for a message."""
    content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # which ast and tokenize count differently
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about code of others
            tree = ast.parse(content)
        comments = _comments(content)  # not all that ast accepts is accepted here
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise UserError(
            f"data.path: {name} is no Python file for this Python ({str(error) or type(error).__name__}); leave it out,"
            " or take another folder"
        ) from error
    docstrings = {number for node in ast.walk(tree) for number in _docstring(node)}
    whole = enumerate(content.split(b"\n"), start=1)  # as Python counts lines: not at a form feed
    labelled = ((line.rstrip(), 2 if i in docstrings else 1 if i in comments else 0) for i, line in whole)
    return [(line, label) for line, label in labelled if line]


def _docstring(node: ast.AST) -> Iterable[int]:
    """The numbers of the lines of its docstring, if it has one."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return ()
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return ()
    text, last = first.value.value, first.value.end_lineno or first.value.lineno
    return range(first.value.lineno, last + 1) if isinstance(text, str) else ()


def _comments(content: bytes) -> set[int]:
    """The numbers of the lines that hold a comment and nothing else."""
    tokens = tokenize.tokenize(io.BytesIO(content).readline)
    return {
        each.start[0] for each in tokens if each.type == tokenize.COMMENT and not each.line[: each.start[1]].strip()
    }


def _table(found: Sequence[Line], length: int) -> _Lines:
    ids = np.zeros((len(found), length), np.uint8)
    for row, (line, _) in zip(ids, found, strict=True):
        kept = np.frombuffer(line[:length], np.uint8)
        row[: kept.size] = kept
    sizes = np.array([min(len(line), length) for line, _ in found], np.int32)
    return _Lines(ids, sizes, np.array([label for _, label in found], np.int32))


def _samples(table: _Lines) -> Samples:
    length = table.ids.shape[1]

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        seen = np.arange(length) < table.length[numbers][:, None]
        inputs = table.ids[numbers].astype(np.int32)
        return {"inputs": inputs, "attention_mask": seen.astype(np.int32), "label": table.label[numbers]}

    row = jax.ShapeDtypeStruct((length,), np.int32)
    leaves = {"inputs": row, "attention_mask": row, "label": jax.ShapeDtypeStruct((), np.int32)}
    return Samples(len(table.label), leaves, read)


def _simple_methods(train: _Lines, held_out: _Lines) -> dict[str, float]:
    """The accuracy of the most frequent label, and of a logistic regression on words and characters of the line."""
    found = majority(train.label, held_out.label)
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        return found  # the extra `examples` is not installed
    few, other = (_some(table, most) for table, most in zip((train, held_out), MOST, strict=True))
    bag = HashingVectorizer(n_features=2**16, token_pattern=r"\w+|[^\w\s]", alternate_sign=False)
    features = [bag.transform([_as_text(row) for row in table.ids]) for table in (few, other)]
    fitted = LogisticRegression(max_iter=200, C=10.0).fit(features[0], few.label)
    return found | {"bag of words": float(fitted.score(features[1], other.label))}


def _as_text(row: np.ndarray) -> str:
    return row.tobytes().rstrip(b"\0").decode("latin-1")


def _some(table: _Lines, most: int) -> _Lines:
    """At most so many lines, at even distances."""
    size = len(table.label)
    rows = np.arange(min(most, size)) * size // min(most, size)
    return _Lines(*(array[rows] for array in table))
