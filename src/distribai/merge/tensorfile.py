"""Safetensors files: one checked reader, one deterministic streaming writer.

Format: 8 bytes little-endian header length, that many bytes of JSON (name -> ``dtype``, ``shape``,
``data_offsets``; ``__metadata__`` maps strings to strings), then the tensors' bytes without holes.
https://github.com/huggingface/safetensors#format

The reader trusts nothing: the whole header is checked against the file's size and against what the
caller expects before a byte is mapped; data is memory-mapped read-only and never copied. The writer
makes the same bytes for the same tensors and metadata, always (``core.framing``).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from distribai.core.framing import METADATA, Entry, Layout, file_order, lay_out
from distribai.core.spec import BlobRef
from distribai.errors import Integrity

__all__ = [
    "BLOCK",
    "MAX_HEADER",
    "NUMPY_DTYPES",
    "Entry",
    "Layout",
    "TensorFile",
    "TensorWriter",
    "Written",
    "file_order",
    "open_tensors",
]

Array = NDArray[Any]

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),  # numpy has no bf16: its bits travel as uint16
    "I64": np.dtype("<i8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
MAX_HEADER = 16 << 20
"""Largest header accepted, bytes: about 100,000 tensors."""
BLOCK = 1 << 20
"""Bytes per read when a finished file is hashed."""
WINDOW = 2 << 20
"""Bytes of address space in which a system may map what lies around a byte that is touched: Linux
maps up to 64 KiB, or a whole huge page, and never beyond one table of page entries."""


class Pages:
    """A file's mapping, parts of which can leave this process's memory."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        # Windows are aligned in memory, not in the file.
        self._ahead = np.frombuffer(mapping, np.uint8).ctypes.data % WINDOW

    def release(self, begin: int, end: int) -> None:
        """Let the bytes ``begin <= i < end`` leave, and what else lies in their :data:`WINDOW`s.

        What they hold stays in the file, and can still be read and written by any thread at any
        time: the system fetches it again. No effect where the system has no such call.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        ahead = self._ahead
        first = max(0, (begin + ahead) // WINDOW * WINDOW - ahead)
        last = min(len(self._mapping), -(-(end + ahead) // WINDOW) * WINDOW - ahead)
        if last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open file. ``arrays`` are read-only memory-mapped views; they keep the mapping alive."""

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    arrays: Mapping[str, Array]
    data_start: int
    pages: Pages

    def release(self, name: str, start: int, stop: int) -> None:
        """Let the pages of elements ``start <= i < stop``, and their neighbours, leave this
        process's memory: see :meth:`Pages.release`."""
        entry = self.entries[name]
        item, begin = NUMPY_DTYPES[entry.dtype].itemsize, self.data_start + entry.begin
        self.pages.release(begin + start * item, begin + stop * item)


def open_tensors(path: Path, layout: Layout | Callable[[Mapping[str, str]], Layout]) -> TensorFile:
    """Map a file after its header was checked.

    Args:
        path: a file that nobody changes while it is mapped (blobs are immutable).
        layout: the tensors it must hold, no more and no fewer; or a function of the file's
            metadata that says so, or raises.

    Raises:
        Integrity: ``tensor.format``, not a well-formed safetensors file; ``tensor.manifest``,
            well-formed but with other names, dtypes or shapes.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        metadata, entries, data_start = _read_header(file, size)
        _require(entries, layout(metadata) if callable(layout) else layout)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    arrays = {name: _view(mapping, data_start, entry) for name, entry in entries.items()}
    return TensorFile(metadata, entries, arrays, data_start, Pages(mapping))


def _view(mapping: mmap.mmap, data_start: int, entry: Entry) -> Array:
    dtype = NUMPY_DTYPES[entry.dtype]
    count = math.prod(entry.shape)
    flat: Array = np.frombuffer(mapping, dtype, count, data_start + entry.begin)
    return flat.reshape(entry.shape)


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, Entry], int]:
    if size < 8:
        raise _malformed(f"{size} bytes are too few for a header")
    (length,) = struct.unpack("<Q", file.read(8))
    if not 2 <= length <= min(size - 8, MAX_HEADER):
        raise _malformed(f"a header of {length} bytes does not fit a file of {size}")
    try:
        header = json.loads(
            file.read(length).decode(), object_pairs_hook=_unique, parse_constant=_constant
        )
    except (ValueError, RecursionError) as problem:
        raise _malformed(f"the header is not JSON ({problem})") from None
    if not isinstance(header, dict):
        raise _malformed("the header is not a mapping")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _malformed("the metadata are not strings by name")
    entries = {name: _entry(name, value) for name, value in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda kv: (kv[1].begin, kv[1].end)):
        if entry.begin != end:
            raise _malformed(f"{name!r} starts at byte {entry.begin}, not at {end}")
        end = entry.end
    if 8 + length + end != size:
        raise _malformed(f"the file has {size} bytes, its header says {8 + length + end}")
    return metadata, entries, 8 + length


def _entry(name: str, value: object) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _malformed(f"the entry of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise _malformed(f"{name!r} has no dtype")
    if dtype not in NUMPY_DTYPES:
        raise _differs(f"{name!r} has dtype {dtype!r}, which is not in use here")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _malformed(f"{name!r} has an impossible shape or offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * NUMPY_DTYPES[dtype].itemsize:
        raise _malformed(f"{name!r} spans {end - begin} bytes, which is not its shape's size")
    return Entry(dtype, tuple(shape), begin, end)


def _naturals(value: object) -> bool:
    # Bounded, so that a product of shapes cannot be made to take minutes.
    return (
        isinstance(value, list)
        and len(value) <= 32
        and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _constant(text: str) -> object:
    raise ValueError(f"{text} is not a number")


def _require(entries: Mapping[str, Entry], layout: Layout) -> None:
    for name in layout.keys() - entries.keys():
        raise _differs(f"{name!r} is missing")
    for name in entries.keys() - layout.keys():
        raise _differs(f"{name!r} does not belong there")
    for name, (dtype, shape) in layout.items():
        found = entries[name]
        if (found.dtype, found.shape) != (dtype, shape):
            raise _differs(
                f"{name!r} is {found.dtype}{list(found.shape)}, not {dtype}{list(shape)}"
            )


def _malformed(why: str) -> Integrity:
    return Integrity("tensor.format", f"Not a well-formed safetensors file: {why}.")


def _differs(why: str) -> Integrity:
    return Integrity("tensor.manifest", f"The file's tensors are not the expected ones: {why}.")


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file: its blob, and SHA-256 (hex) of each tensor's bytes by name."""

    blob: BlobRef
    tensors: Mapping[str, str]


class TensorWriter:
    """Writes one file; a context manager that leaves nothing behind without :meth:`commit`.

    Elements may be written in any order and from several threads. The bytes go to a temporary file
    beside ``path``; :meth:`commit` syncs it and renames it over ``path``.

    Args:
        path: where the finished file shall lie; its directory exists.
        layout: all tensors of the file.
        metadata: strings by name.

    Raises:
        OSError: the file cannot be written (a full disk among them).
    """

    def __init__(self, path: Path, layout: Layout, metadata: Mapping[str, str]) -> None:
        self._path = path
        self._entries, header = lay_out(layout, metadata)
        self._data_start = len(header)
        self._missing = {name: math.prod(e.shape) for name, e in self._entries.items()}
        self._lock = threading.Lock()
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        self._temporary = Path(name)
        self._file = os.fdopen(handle, "w+b", buffering=0)
        self._put(0, memoryview(header))

    def write(self, name: str, start: int, values: Array) -> None:
        """Write the elements ``start, start + 1, ...`` (C order) of tensor ``name``.

        Raises:
            ValueError: another dtype than planned, or beyond the tensor's end.
        """
        entry = self._entries[name]
        dtype = NUMPY_DTYPES[entry.dtype]
        size = math.prod(entry.shape)
        if values.dtype != dtype or start < 0 or start + values.size > size:
            raise ValueError(f"{values.dtype}[{values.size}] at {start} does not fit {name!r}")
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        with self._lock:
            self._put(self._data_start + entry.begin + start * dtype.itemsize, data.data)
            self._missing[name] -= values.size

    def commit(self) -> Written:
        """Hash, sync and rename; the file appears whole or not at all.

        Raises:
            ValueError: not every element was written exactly once.
        """
        wrong = [name for name, left in self._missing.items() if left]
        if wrong:
            raise ValueError(f"tensor {wrong[0]!r} was not written exactly once")
        written = self._hash()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        _sync_directory(self._path.parent)
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._file.closed:
            self._file.close()
            self._temporary.unlink()

    def _put(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        while len(data):
            data = data[self._file.write(data) :]

    def _hash(self) -> Written:
        # Read back rather than hashed on the way: tensors may be written in any order.
        whole, tensors = hashlib.sha256(), {}
        self._file.seek(0)
        whole.update(self._file.read(self._data_start))
        for name, entry in self._entries.items():
            one, left = hashlib.sha256(), entry.end - entry.begin
            while left:
                block = self._file.read(min(left, BLOCK))
                if not block:
                    raise OSError(f"{self._temporary} ends early")
                one.update(block)
                whole.update(block)
                left -= len(block)
            tensors[name] = one.hexdigest()
        return Written(BlobRef(whole.hexdigest(), self._file.tell()), tensors)


def _sync_directory(directory: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # not POSIX: a directory cannot be synced there
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
