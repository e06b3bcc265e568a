"""How a safetensors file of ours is laid out, without any tensor library: entries and header.

``merge.tensorfile`` writes and reads such files; here is what decides their bytes but the values,
so that a plan can say how large a file will be. The same layout and metadata always give the same
header: larger items first (so that all are aligned), then by name, padded with spaces to 64 bytes.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""What a file holds or must hold: name -> (dtype in safetensors' spelling, shape)."""

ITEM_BYTES: Final[Mapping[str, int]] = {"F32": 4, "BF16": 2, "I64": 8, "I8": 1, "U8": 1}
"""Bytes of one element of each dtype that these files hold."""

METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; ``begin`` and ``end`` in bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def file_order(layout: Layout) -> list[str]:
    """Names in the order in which they lie in a file."""
    return sorted(layout, key=lambda name: (-ITEM_BYTES[layout[name][0]], name))


def lay_out(layout: Layout, metadata: Mapping[str, str]) -> tuple[dict[str, Entry], bytes]:
    """Where each tensor will lie, in the file's order, and the header that says so.

    Raises:
        ValueError: a tensor has the name that is the metadata's.
    """
    if METADATA in layout:
        raise ValueError(f"a tensor cannot be called {METADATA}")
    entries: dict[str, Entry] = {}
    begin = 0
    for name in file_order(layout):
        dtype, shape = layout[name]
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = Entry(dtype, shape, begin, end)
        begin = end
    header: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    for name, e in entries.items():
        header[name] = {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "data_offsets": [e.begin, e.end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return entries, struct.pack("<Q", len(text)) + text


def file_bytes(layout: Layout, metadata: Mapping[str, str]) -> int:
    """Size of a file in bytes, header included."""
    entries, header = lay_out(layout, metadata)
    return len(header) + max((e.end for e in entries.values()), default=0)
