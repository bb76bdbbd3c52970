"""Tokenizers: that of a Hugging Face folder, by the package `tokenizers`, and bytes.

A folder may be anybody's. No code in it is run, and what it holds is read within limits. It may hold:

- tokenizer.json: the tokenizer itself. It must be there.
- tokenizer_config.json, special_tokens_map.json: which tokens begin and end a text.
- chat_template.jinja: the chat template. Otherwise it is in tokenizer_config.json.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxdist.config.json_reader import read_json_file
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path

_FILE, _CONFIG, _SPECIAL, _TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
TOKENIZER_BYTES = 128 << 20  # of tokenizer.json; the largest that are in use have 35 MB
TEMPLATE_BYTES = 1 << 20
LARGEST_VOCAB = 1 << 24  # ids are below it


class Encoded(NamedTuple):
    """A text as ids, and where each of them begins and ends in the text, in characters."""

    ids: list[int]
    begins: list[int]
    ends: list[int]


class _Model(Protocol):
    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Tokenizer:
    """Texts to ids, and back.

    >>> from jaxdist.data.text.tokenizer import byte_tokenizer
    >>> byte_tokenizer().encode("Hi!")
    [72, 105, 33]
    >>> byte_tokenizer().decode([72, 105, 33])
    'Hi!'

    - name: of its file, or "bytes".
    - vocab: ids are in [0, vocab).
    - sha256: of its file; "" of bytes.
    - bos, eos: the ids that begin and end a text. None: it has none.
    - before: the ids that the tokenizer puts before a text by itself, such as `bos`.
    - special: the texts of special tokens, by their names: {"eos_token": "</s>"}. Chat templates use them.
    - chat_template: the source of the template. None: the folder has none.
    - folder: that its files are in. None: of bytes.
    """

    name: str
    vocab: int
    sha256: str
    key: str  # of the configuration, for messages
    model: _Model = field(repr=False)
    bos: int | None = None
    eos: int | None = None
    before: tuple[int, ...] = ()
    special: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = field(default=None, repr=False)
    folder: Path | None = None

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Nothing is added to it; a special token that the text holds is one id."""
        return self.encode_batch([text])[0].ids

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """`encode` of each text, with the places of the ids. Raises `UserError` where that is not possible."""
        try:
            return self.model.encode_batch(texts)
        except UnicodeError as error:
            raise UserError(
                f"{self.key}: a text has half of a surrogate pair, which is no text ({error}); remove it"
            ) from error

    def check_end(self, text: str | None = None) -> None:
        """Raise `UserError` for an end token that is named and that the tokenizer does not have.

        text: one that needs the token only where it holds its name, as a chat template writes it.
        """
        named = self.special.get("eos_token")
        if self.eos is None and named is not None and (text is None or named in text):
            raise UserError(
                f"{self.key}: eos_token is {named!r} in {str(self.folder)!r}, and {self.name} has no such token; name"
                " one that it has in tokenizer_config.json, or save it again by transformers, which adds it"
            )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Bytes that are no UTF-8 become U+FFFD."""
        return self.model.decode(ids)


class _Bytes:
    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        found = []
        for text in texts:
            sizes = [1] * len(text) if text.isascii() else [len(each.encode()) for each in text]
            begins = [i for i, size in enumerate(sizes) for _ in range(size)]
            found.append(Encoded(list(text.encode()), begins, [i + 1 for i in begins]))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each if each < 256 else 255 for each in ids).decode(errors="replace")  # 255 is in no UTF-8


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose 256 ids are the bytes of a text in UTF-8."""
    return Tokenizer("bytes", 256, "", "data.tokenizer", _Bytes())


class _Package:
    """A tokenizer of the package `tokenizers`."""

    def __init__(self, model: Any, key: str) -> None:
        self._model, self._key = model, key

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        for text in texts:
            text.encode()  # raises for what the package would call a wrong type
        try:
            found = self._model.encode_batch(list(texts), add_special_tokens=False)
        except BaseException as error:  # a panic in Rust is no Exception
            raise UserError(
                f"{self._key}: cannot encode {texts[0][:40]!r} or a text after it ({_one_line(error)}); use a tokenizer"
                " that has an unknown token, or bytes"
            ) from _not_interrupted(error)
        return [Encoded(each.ids, *_places(each.offsets)) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids), skip_special_tokens=False)


def _places(offsets: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [begin for begin, _ in offsets], [end for _, end in offsets]


def _not_interrupted(error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def package(*, key: str, where: str, instead: str = "") -> Any:
    """The class `Tokenizer` of the package `tokenizers`. Raises `UserError` where it is not installed.

    where: the file that needs it. instead: what the user may do without it.
    """
    try:
        from tokenizers import Tokenizer as Model
    except ImportError as error:
        raise UserError(
            f"{key}: {where!r} needs the package tokenizers, which is not installed; pip install 'jaxdist[hf]'{instead}"
        ) from error
    return Model


def open_model(content: bytes, *, key: str, where: str) -> Any:
    """The object of the package `tokenizers` in the content of a tokenizer.json. It cuts and pads nothing.

    where: the file, for messages. Raises `UserError` where that is no tokenizer.
    """
    model_class = package(key=key, where=where)
    try:
        model = model_class.from_str(content.decode())
    except BaseException as error:  # the package raises nothing more exact; a panic in Rust is no Exception
        raise UserError(
            f"{key}: {where!r} holds no tokenizer ({_one_line(error)}); give a tokenizer.json"
        ) from _not_interrupted(error)
    model.no_truncation()
    model.no_padding()
    return model


def vocab_of(model: Any, *, key: str, where: str) -> int:
    """One more than the largest id of a tokenizer. Raises `UserError` for one without ids, or with too large ones."""
    largest = max(model.get_vocab().values(), default=-1)
    if not 0 <= largest < LARGEST_VOCAB:
        raise UserError(f"{key}: {where!r} has the largest id {largest}; allowed: ids from 0 to {LARGEST_VOCAB - 1}")
    return 1 + largest


def load_tokenizer(folder: Path, *, key: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or of its tokenizer.json alone.

    key: the configuration key or option that messages name. Raises `UserError`: no such folder, no tokenizer.json in
    it, a file that is damaged or too large, the package `tokenizers` is not installed.
    """
    folder = user_path(folder, key=key)
    file = folder if folder.is_file() else folder / _FILE
    folder = file.parent
    if not folder.is_dir():
        raise UserError(f"{key}: {str(folder)!r} does not exist; give a folder with a {_FILE}")
    if not file.is_file():
        raise UserError(
            f"{key}: {str(folder)!r} holds no {_FILE}; give a folder that does (AutoTokenizer.from_pretrained(MODEL)"
            ".save_pretrained(FOLDER) of transformers writes one)"
        )
    content = _content(file, TOKENIZER_BYTES, key)
    model = open_model(content, key=key, where=str(file))
    vocab = vocab_of(model, key=key, where=str(file))
    config, texts = _settings(folder / _CONFIG, key), dict[str, str]()
    for settings in (_settings(folder / _SPECIAL, key), config):  # the latter counts
        texts |= {name: text for name, value in settings.items() if (text := _token_text(name, value)) is not None}
    ids = {name: model.token_to_id(text) for name, text in texts.items()}
    before = _before(model)
    model.post_processor = None  # that of GPT-2 says that a word begins after the blank before it
    return Tokenizer(
        name=file.name,
        vocab=vocab,
        sha256=hashlib.sha256(content).hexdigest(),
        key=key,
        model=_Package(model, key),
        bos=ids.get("bos_token"),
        eos=ids.get("eos_token"),
        before=before,
        special=texts,
        chat_template=_template(folder, config, key),
        folder=folder,
    )


def copy_tokenizer(tokenizer: Tokenizer, output: Path) -> list[str]:
    """Copy the files of a tokenizer to a folder that is there. Returns their names."""
    assert tokenizer.folder is not None
    names = [name for name in (_FILE, _CONFIG, _SPECIAL, _TEMPLATE) if (tokenizer.folder / name).is_file()]
    for name in names:
        (output / name).write_bytes(_content(tokenizer.folder / name, TOKENIZER_BYTES, tokenizer.key))
    return names


def _before(model: Any) -> tuple[int, ...]:
    """What the tokenizer's post-processor puts before a text."""
    try:
        plain, whole = (model.encode("a", add_special_tokens=add).ids for add in (False, True))
    except BaseException as error:  # as above: of a tokenizer that cannot encode every text
        _not_interrupted(error)
        return ()
    return next((tuple(whole[:i]) for i in range(len(whole)) if whole[i : i + len(plain)] == plain), ())


def _content(file: Path, most: int, key: str) -> bytes:
    """The content of a file of at most so many bytes."""
    try:
        with file.open("rb") as stream:
            content = stream.read(most + 1)
    except OSError as error:
        raise UserError(
            f"{key}: cannot read {str(file)!r}: {error.strerror}; check the file and its permissions"
        ) from error
    if len(content) > most:
        raise UserError(f"{key}: {str(file)!r} is too large; allowed: {most} bytes")
    return content


def _settings(file: Path, key: str) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    if not file.exists():
        return {}
    try:
        found = read_json_file(file, any_number=True)  # model_max_length is 10**30 in many
    except (ValueError, OSError) as error:
        raise UserError(f"{key}: {str(file)!r} cannot be read ({_one_line(error)}); copy it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{key}: {str(file)!r} holds {type(found).__name__}; allowed: a JSON object")
    return found


def _token_text(name: str, value: Any) -> str | None:
    """The text of a special token: "</s>", or {"content": "</s>", ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if name.endswith("_token") and isinstance(text, str) else None


def _template(folder: Path, config: Mapping[str, Any], key: str) -> str | None:
    """The chat template of a folder: in a file of its own, or in tokenizer_config.json, alone or as one of several."""
    if (folder / _TEMPLATE).is_file():
        return template_file(folder / _TEMPLATE, key=key)
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise UserError(f"{key}: chat_template in {str(folder / _CONFIG)!r} is no text; give a template of jinja")
    if found is not None and len(found) > TEMPLATE_BYTES:
        raise UserError(
            f"{key}: chat_template in {str(folder / _CONFIG)!r} is too large; allowed: {TEMPLATE_BYTES} bytes"
        )
    return found


def template_file(file: Path, *, key: str) -> str:
    """The chat template in a file of its own. Raises `UserError`: not there, too large, not UTF-8."""
    try:
        return _content(file, TEMPLATE_BYTES, key).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: {str(file)!r} is not UTF-8 ({error}); give a template of jinja") from error
