"""Answering with a blob: whole or one byte range, with its hash as the entity tag (RFC 9110); or
with where the object store has it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Annotated, Any

from fastapi import Header
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from distribai.core.direct import FOLLOW_HEADER, SMALL
from distribai.core.spec import BlobRef
from distribai.errors import Unavailable
from distribai.store.blobs import BlobStore
from distribai.store.presigning import Presigner

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")

PIECE = 1 << 16
"""Bytes of an answer that are handed to the connection at a time: so many at most are counted as
sent to a caller who goes away meanwhile, besides what the connection holds (``connections.AHEAD``).
"""

_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

RANGES: dict[int | str, dict[str, Any]] = {
    200: {"description": "All bytes.", "content": _BYTES},
    206: {"description": "The range asked for.", "content": _BYTES},
    304: {"description": "The ETag still holds."},
    307: {"description": "Fetch it there, with the same Range and without credentials."},
    416: {"description": "The range lies outside the blob."},
}
"""What a route that answers with a blob may say, for the description."""


FollowHeader = Annotated[
    str,
    Header(
        alias=FOLLOW_HEADER,
        description="1: may be answered with 307, to the object store that has the bytes.",
        pattern="^1?$",
    ),
]


class CutOff(Exception):
    """The blob store failed in the middle of an answer: the connection ends, and whoever asked goes
    on from there with a range."""


class Unsatisfiable(Exception):
    """The range lies outside the blob."""


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last, of a ``Range`` header; None means the whole blob.

    Several ranges, other units and nonsense are ignored, as RFC 9110 section 14.2 allows.

    Raises:
        Unsatisfiable: the range is well formed and has no byte of the blob in it.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        length = min(int(last), size)
        start, stop = size - length, size
    else:
        start = int(first)
        stop = min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= stop:
        raise Unsatisfiable
    return start, stop


async def blob_response(
    request: Request,
    blobs: BlobStore,
    ref: BlobRef,
    *,
    headers: Mapping[str, str] | None = None,
    sent: Callable[[int], None] = lambda _: None,
    presigner: Presigner | None = None,
) -> Response:
    """GET or HEAD of a blob that exists. ``sent`` is told the bytes that went out, once: all of an
    answer that was taken, and of one that broke off what the connection has taken of it.
    ``presigner`` sends the asker to the object store, unless it wants a few bytes only; the answer
    then has the entity tag, and the store's own is to be ignored."""
    tag = f'"{ref.sha256}"'
    base = {
        "ETag": tag,
        "Accept-Ranges": "bytes",
        # Named by its hash, a blob never changes; but it is not for shared caches.
        "Cache-Control": "private, max-age=31536000, immutable",
        **(headers or {}),
    }
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=base)
    start, stop, status = 0, ref.size, 200
    if request.headers.get("if-range", tag) == tag:
        try:
            asked = parse_range(request.headers.get("range", ""), ref.size)
        except Unsatisfiable:
            return Response(
                status_code=416, headers={**base, "Content-Range": f"bytes */{ref.size}"}
            )
        if asked is not None:
            start, stop, status = *asked, 206
            base["Content-Range"] = f"bytes {start}-{stop - 1}/{ref.size}"
    if presigner is not None and request.method == "GET" and stop - start >= SMALL:
        # Whoever else reads the address could fetch the blob: it is kept nowhere.
        there = {"Location": await presigner.address(ref.sha256), "Cache-Control": "no-store"}
        return Response(status_code=307, headers={**(headers or {}), "ETag": tag, **there})
    base["Content-Length"] = str(stop - start)
    media = "application/octet-stream"
    if request.method == "HEAD":
        return Response(status_code=status, headers=base, media_type=media)
    chunks = blobs.read(ref.sha256, start, stop)
    # What fails before the first byte is answered as what it is.
    first = await anext(chunks, b"")
    return StreamingResponse(_counted(first, chunks, sent), status, headers=base, media_type=media)


def _pieces(chunk: bytes) -> Iterator[bytes]:
    for start in range(0, len(chunk), PIECE):
        yield chunk[start : start + PIECE]


async def _counted(
    first: bytes, rest: AsyncIterator[bytes], sent: Callable[[int], None]
) -> AsyncIterator[bytes]:
    total = 0
    try:
        for piece in _pieces(first):
            yield piece
            total += len(piece)
        async for chunk in rest:
            for piece in _pieces(chunk):
                yield piece
                total += len(piece)
    except Unavailable as problem:
        raise CutOff(problem.message) from problem
    finally:
        sent(total)
