"""The file of one token shard: safetensors with the single tensor ``tokens``.

The header is a function of dtype and length alone, so the same tokens make the same bytes
everywhere, and a reader needs to parse nothing: it compares the header that the manifest promises.
Format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON, data).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from distribai.core.spec import BlobRef
from distribai.errors import Integrity

TokenDType = Literal["U16", "I32"]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]

NUMPY_DTYPE: Final[dict[str, str]] = {"U16": "<u2", "I32": "<i4"}
ITEM_SIZE: Final[dict[str, int]] = {"U16": 2, "I32": 4}
_ALIGNMENT: Final = 64


def dtype_for(vocab_size: int) -> TokenDType:
    """The narrowest dtype that holds every id of a vocabulary."""
    return "U16" if vocab_size <= 1 << 16 else "I32"


def header(dtype: TokenDType, tokens: int) -> bytes:
    """Everything before the data; padded with spaces so that the data is aligned."""
    entry = {
        "dtype": dtype,
        "shape": [tokens],
        "data_offsets": [0, tokens * ITEM_SIZE[dtype]],
    }
    text = json.dumps({"tokens": entry}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write(out_dir: Path, dtype: TokenDType, tokens: npt.NDArray[np.int64]) -> tuple[BlobRef, Path]:
    """Write a shard under its SHA-256's name; a crash leaves no file under such a name.

    ``tokens``: ids, shape (n,), within the dtype's bounds.

    Raises:
        OSError: the disk is full or the directory cannot be written.
    """
    data = tokens.astype(NUMPY_DTYPE[dtype])
    head = header(dtype, tokens.size)
    digest = hashlib.sha256(head)
    digest.update(data.data)
    path = out_dir / f"{digest.hexdigest()}.safetensors"
    handle, part = tempfile.mkstemp(dir=out_dir, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head)
            data.tofile(file)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return BlobRef(digest.hexdigest(), len(head) + data.nbytes), path


def check(path: Path, dtype: TokenDType, tokens: int) -> None:
    """Refuse a file that is not a shard of ``tokens`` ids of ``dtype``.

    Raises:
        Integrity: ``tensor.format``; the header or the length differ, or the file is missing.
    """
    expected = header(dtype, tokens)
    try:
        with path.open("rb") as file:
            found = file.read(len(expected))
            size = os.fstat(file.fileno()).st_size
    except OSError as problem:
        raise Integrity(
            "tensor.format", f"The token shard {path} cannot be read: {problem}."
        ) from problem
    if found != expected or size != len(expected) + tokens * ITEM_SIZE[dtype]:
        raise Integrity(
            "tensor.format",
            f"{path} is not a token shard of {tokens} {dtype} ids.",
            "Fetch it again; its hash was not checked, or the manifest is another one's.",
        )


def open_mapped(path: Path, dtype: TokenDType, tokens: int) -> Tokens:
    """The ids of a shard as a read-only memory map, shape (tokens,).

    Raises:
        Integrity: see :func:`check`.
    """
    check(path, dtype, tokens)
    return np.memmap(
        path,
        dtype=NUMPY_DTYPE[dtype],
        mode="r",
        offset=len(header(dtype, tokens)),
        shape=(tokens,),
    )
