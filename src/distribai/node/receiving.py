"""The file of a blob that comes: what is there of it, and the bytes that an answer brings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import httpx

from distribai.core.spec import BlobRef
from distribai.errors import Integrity
from distribai.node.answers import Passing, range_start
from distribai.node.traffic import Traffic


def size_of(path: Path) -> int:
    """Bytes that are there already; -1 without a file."""
    return path.stat().st_size if path.exists() else -1


def remove(path: Path) -> None:
    """Begin anew: nothing is there."""
    path.unlink(missing_ok=True)


async def collect(
    answer: httpx.Response,
    blob: BlobRef,
    path: Path,
    have: int,
    traffic: Traffic,
    count: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the body of an answer to a request for everything from byte ``have`` on to ``path``,
    which holds those before; ``count`` hears of each piece that comes.

    Raises:
        Passing: the answer does not go on where the file ends.
        Integrity: ``blob.size``: there is more than the blob has; the file is removed.
        OSError: the disk is full.
    """
    if answer.status_code == 416:
        remove(path)
        raise Passing("the range was refused")
    start = range_start(answer) if answer.status_code == 206 else 0
    if start not in (0, have):
        raise Passing(f"the answer starts at byte {start}, not {have}")
    path.parent.mkdir(parents=True, exist_ok=True)
    size = start
    file = await asyncio.to_thread(path.open, "ab" if start else "wb")
    try:
        with traffic.receiving(blob.size - start) as moving:
            async for chunk in answer.aiter_bytes():  # as they come: a cut loses nothing
                count(len(chunk))
                size += len(chunk)
                if size > blob.size:
                    break
                await asyncio.to_thread(_write, file, chunk)
                await moving.go(len(chunk))
    finally:
        file.close()
    if size > blob.size:
        remove(path)
        raise Integrity(
            "blob.size",
            f"The grid sent more for blob {blob.sha256[:12]} than its {blob.size} bytes.",
            "The task will be given to another node; tell the grid's operator.",
        )


def _write(file: BinaryIO, chunk: bytes) -> None:
    file.write(chunk)
    file.flush()  # it counts as here, also for who looks at the file, and when we are killed
