"""From text to token ids and back.

Two kinds: bytes, which need no file, and a JSON of the ``tokenizers`` library that a job brings.
That library is imported only when such a file is opened: the operator's base install may lack it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from distribai.errors import InvalidData

MAX_FILE_BYTES: Final = 64 << 20
"""Largest tokenizer JSON that is read."""

_END_NAMES: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "</s>",
    "<eos>",
    "[SEP]",
)


class Tokenizer(Protocol):
    """What preparing data and generating samples need.

    ``vocab_size`` is one more than the largest id; ``end_of_document`` the id that follows each
    document, or None when the vocabulary has none.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int | None: ...

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of ``text``, shape (n,); no special token is added."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ``ids``; what is not text becomes U+FFFD, special tokens vanish."""


class ByteTokenizer:
    """UTF-8 bytes: ids 0..255 are the bytes, 256 ends a document."""

    vocab_size: Final = 257
    end_of_document: Final = 256

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of ``text``'s UTF-8 bytes, shape (n,)."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ``ids``; a broken UTF-8 sequence becomes U+FFFD, id 256 vanishes."""
        array = np.asarray(ids, np.int64).ravel()
        return bytes(array[(array >= 0) & (array < 256)].astype(np.uint8)).decode(errors="replace")


class JsonTokenizer:
    """A JSON file of the ``tokenizers`` library.

    Args:
        path: the file.
        name: what to call it in messages; its path by default.

    Raises:
        InvalidData: ``data.missing`` (no file, or the library is not installed) or
            ``data.malformed`` (not a tokenizer). Encoding raises the latter, too: only there the
            library notices that text has no token.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self._name = name or str(path)
        self._inner = _open(path, self._name)
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise _malformed(self._name, "it has no vocabulary")
        self._size = max(vocabulary.values()) + 1
        self._end = next((vocabulary[n] for n in _END_NAMES if n in vocabulary), None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._size

    @property
    def end_of_document(self) -> int | None:
        """The id of the first usual end-of-text token that the vocabulary has."""
        return self._end

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of ``text``, shape (n,)."""
        with _library_errors(self._name):
            return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ``ids``, without special tokens."""
        text: str = self._inner.decode(np.asarray(ids, np.int64).ravel().tolist())
        return text


def load(path: Path | None, name: str = "") -> Tokenizer:
    """The tokenizer in ``path``, called ``name`` in messages, or bytes without one.

    Raises:
        InvalidData: see :class:`JsonTokenizer`.
    """
    return ByteTokenizer() if path is None else JsonTokenizer(path, name)


def _open(path: Path, name: str) -> Any:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError as problem:
        raise InvalidData(
            "data.missing",
            "This job brings a tokenizer, and the package that reads it is not installed here.",
            "Install it with `pip install tokenizers`, or train on bytes (leave out `tokenizer`).",
            field="data.tokenizer",
        ) from problem
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise InvalidData(
            "data.missing",
            f"The tokenizer {name} cannot be read: {problem.strerror}.",
            "Check the path.",
            field="data.tokenizer",
        ) from problem
    if len(raw) > MAX_FILE_BYTES:
        raise _malformed(name, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        if not isinstance(json.loads(raw), dict):
            raise _malformed(name, "it is not a JSON object")
        text = raw.decode()
    except (ValueError, RecursionError) as problem:
        raise _malformed(name, str(problem)) from problem
    with _library_errors(name):
        return Inner.from_str(text)


@contextmanager
def _library_errors(name: str) -> Iterator[None]:
    """Say in our words that the library does not get on with a file.

    It raises bare `Exception` for whatever is wrong, and nothing narrower; where it did not look it
    panics, which Python sees as a class that cannot be imported. Every other class is a defect and
    goes on.
    """
    try:
        yield
    except BaseException as problem:
        if type(problem) is not Exception and type(problem).__name__ != "PanicException":
            raise
        raise _malformed(name, str(problem)) from problem


def _malformed(name: str, why: str) -> InvalidData:
    return InvalidData(
        "data.malformed",
        f"{name} is not a usable tokenizer JSON: {why}.",
        "It must be the `tokenizer.json` that the `tokenizers` library saves.",
        field="data.tokenizer",
    )
