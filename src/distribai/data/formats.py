"""Text and JSON Lines as documents, read with bounded memory.

A document comes in one or more :class:`Piece` of about a megabyte, cut after a line where
possible, so that a file of any size streams through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, Protocol

from distribai.errors import InvalidData

Format = Literal["text", "jsonl"]

CHUNK_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 16 << 20
"""Longest line of a JSON Lines file."""

_BOM: Final = "\ufeff"


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a document's text; ``last`` when the document ends with it. ``text`` may be empty."""

    text: str
    last: bool


class Readable(Protocol):
    """A binary stream: all that a blob or a file must offer."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; ``b""`` at the end."""


def read_files(
    paths: Sequence[Path], format: Format, field: str = "text", names: Sequence[str] = ()
) -> Iterator[Piece]:
    """The documents of ``paths`` in this order; files are opened one after the other. ``names``
    stand for them in messages; their paths by default.

    Raises:
        InvalidData: ``data.missing`` (a file cannot be read), ``data.not_utf8`` (with the byte's
            offset), ``data.malformed`` (with the line's number). Raised while iterating.
    """
    for path, name in zip(paths, names or [str(p) for p in paths], strict=True):
        with closing(_open(path)) as stream:
            yield from read_stream(stream, name, format, field)


def read_stream(
    stream: Readable, name: str, format: Format, field: str = "text"
) -> Iterator[Piece]:
    """The documents of one stream: a single one (text), or one per line (jsonl).

    ``name`` stands for the stream in messages; ``field`` is the JSON field with the text. A
    byte-order mark at the start is dropped; line ends stay as they are.

    Raises:
        InvalidData: see :func:`read_files`.
    """
    return _read_jsonl(stream, name, field) if format == "jsonl" else _read_text(stream, name)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as problem:
        raise InvalidData(
            "data.missing",
            f"The data file {path} cannot be read: {problem.strerror}.",
            "Check the path; relative paths start at the current directory.",
            field="data.files",
        ) from problem


def _read_text(stream: Readable, name: str) -> Iterator[Piece]:
    pending, offset = b"", 0
    while chunk := stream.read(CHUNK_BYTES):
        pending += chunk
        whole = _whole_text(pending, name, offset)
        cut = pending.rfind(b"\n", 0, whole) + 1 or whole
        # A line longer than a chunk is cut inside, or a file without line ends would pile up.
        if cut:
            yield Piece(_text_at(pending[:cut].decode(), offset), last=False)
            pending, offset = pending[cut:], offset + cut
    yield Piece(_decode(pending, name, offset), last=True)


def _text_at(text: str, offset: int) -> str:
    """``text`` that starts at byte ``offset`` of its stream, without the byte-order mark."""
    return text if offset else text.removeprefix(_BOM)


def _whole_text(raw: bytes, name: str, offset: int) -> int:
    """How many bytes of ``raw`` are whole characters; at most three are left over."""
    try:
        raw.decode()
    except UnicodeDecodeError as problem:
        if problem.end == len(raw) and problem.reason == "unexpected end of data":
            return problem.start
        raise _not_utf8(name, offset + problem.start) from None
    return len(raw)


def _decode(raw: bytes, name: str, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as problem:
        raise _not_utf8(name, offset + problem.start) from None


def _not_utf8(name: str, offset: int) -> InvalidData:
    return InvalidData(
        "data.not_utf8",
        f"{name} is not UTF-8 text: byte {offset} does not belong there.",
        "Convert the file, for example with `iconv -f latin1 -t utf-8`.",
        field="data.files",
    )


def _read_jsonl(stream: Readable, name: str, field: str) -> Iterator[Piece]:
    offset = 0
    for number, raw in enumerate(_lines(stream, name), start=1):
        line = _text_at(_decode(raw, name, offset), offset)
        offset += len(raw)
        if line.strip():
            yield Piece(_text_of(line, field, name, number), last=True)


def _lines(stream: Readable, name: str) -> Iterator[bytes]:
    """Lines with their ends; the memory they take is bounded by :data:`MAX_LINE_BYTES`."""
    pending, number = bytearray(), 0
    while chunk := stream.read(CHUNK_BYTES):
        first, *rest = chunk.split(b"\n")
        pending += first
        for part in rest:
            number += 1
            yield bytes(pending) + b"\n"
            pending = bytearray(part)
        if len(pending) > MAX_LINE_BYTES:
            raise _malformed(name, number + 1, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
    if pending:
        yield bytes(pending)


def _text_of(line: str, field: str, name: str, number: int) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise _malformed(name, number, f"is not JSON ({problem})") from None
    if not isinstance(record, dict):
        raise _malformed(name, number, "is not a JSON object")
    text = record.get(field)
    if not isinstance(text, str):
        raise _malformed(name, number, f"has no text in the field {field!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _malformed(name, number, "holds half of a surrogate pair") from None
    return text


def _malformed(name: str, number: int, why: str) -> InvalidData:
    return InvalidData(
        "data.malformed",
        f"Line {number} of {name} {why}.",
        'JSON Lines hold one object a line, such as {"text": "..."}; `field` names the text.',
        field="data.files",
    )
