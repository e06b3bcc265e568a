"""Blobs by hash: begin, go on, ask, fetch. The only routes that nodes may use.

A node may fetch what its work needs, and bring results of it (``fleet.supplies``). Whoever names
bytes must have sent them before, also bytes that are here already; an account may fetch what it has
sent, and what its organizations' jobs have made. All else is as unknown as what never was.

An upload: ``POST /blobs`` with hash and size (done when the blob is there already), then ``PATCH``
the bytes at the offset so far, in as many requests as it takes; ``HEAD`` tells the offset after a
broken connection. Bytes between nodes and this process are counted to the job that the header
``X-DistribAI-Job`` names; those that a node fetched from the object store, where it was sent, are
counted as it says (``core.direct``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request

from distribai.core.people import Principal, Scope
from distribai.core.spec import BlobRef
from distribai.errors import DistribAIError, NotFound, UsageError
from distribai.orchestrator import traffic
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import supplies
from distribai.orchestrator.http import problems
from distribai.orchestrator.http.parameters import IdempotencyKey
from distribai.orchestrator.http.ranges import RANGES, FollowHeader, blob_response
from distribai.orchestrator.http.security import Access, Caller, GridOf, allow
from distribai.orchestrator.idempotency import Key, key_for, made_before, stand_for
from distribai.orchestrator.people import admission, sight
from distribai.orchestrator.retention import is_settled
from distribai.store.blobs import check_blob, no_blob
from distribai.store.uploads import Upload

DRAIN = 16 << 20
"""Bytes still read of a refused upload: a client that is cut off while it sends never sees why."""

router = APIRouter(prefix="/blobs", tags=["blobs"])

JobHeader = Annotated[
    str,
    Header(
        alias="X-DistribAI-Job",
        description="The job that the bytes are for, and are counted to.",
        pattern="^[a-z0-9_]{0,40}$",
    ),
]


class BeginUpload(BaseModel):
    """What is going to be uploaded."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0)]


class Fetched(BaseModel):
    """What one answer of the object store came to."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: Annotated[int, Field(ge=0)]


class UploadState(BaseModel):
    """Where an upload stands. With ``complete`` the blob is there and nothing is left to do."""

    complete: bool
    upload_id: str = ""
    offset: int = 0


@router.post("", summary="Begin an upload", responses={201: {"model": UploadState}})
@allow(Access.SENDERS, Scope.SUBMIT)
async def begin_upload(
    body: BeginUpload,
    grid: GridOf,
    caller: Caller,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> UploadState:
    """200 with ``complete`` when the blob is there already, else 201 and where to send it.

    One that is there, but torn, is sent again, and so is one that would be cleaned away before it
    is used."""
    ref = BlobRef(body.sha256, body.size)
    if await sight.may_name(grid, caller, ref):
        with suppress(NotFound):
            stored = await grid.blobs.stat(ref.sha256)
            if stored.ref == ref and await is_settled(grid, stored):
                return UploadState(complete=True)
            if stored.ref != ref and await grid.blobs.is_whole(stored.ref):
                check_blob(stored.ref, ref, f"blob {ref.sha256[:12]}")
    await admission.check_upload(grid, caller, ref)
    key = key_for(caller.owner, "uploads", idempotency_key, body.model_dump())
    upload = await _begin(grid, ref, key, sight.sender(caller))
    response.status_code = 201
    response.headers["Location"] = f"/api/v1/blobs/uploads/{upload.id}"
    response.headers["Upload-Offset"] = str(upload.offset)
    return UploadState(complete=False, upload_id=upload.id, offset=upload.offset)


async def _begin(grid: Grid, ref: BlobRef, key: Key | None, sender: str) -> Upload:
    """A new upload, or the one that the key began before, if it is still under way.

    Raises:
        Conflict: ``http.idempotency``.
    """
    if key is None:
        return grid.blobs.uploads.begin(ref, sender)
    async with grid.db.read() as tx:
        before = await made_before(tx, key)
    if before is not None:
        try:
            return grid.blobs.uploads.offset(before)
        except NotFound:
            pass  # it was dropped, or another replica has it: from the beginning
    upload = grid.blobs.uploads.begin(ref, sender)
    async with grid.db.write() as tx:
        if await stand_for(tx, key, upload.id, before):
            return upload
    # The same request came twice at once, and the other one was first.
    grid.blobs.uploads.drop(upload.id)
    return await _begin(grid, ref, key, sender)


@router.head("/uploads/{upload_id}", summary="Where an upload stands")
@allow(Access.SENDERS, Scope.SUBMIT)
async def upload_offset(upload_id: str, grid: GridOf, caller: Caller) -> Response:
    """``Upload-Offset`` is where to go on, ``Upload-Length`` the declared size."""
    claim = grid.blobs.uploads.claim(upload_id, sight.sender(caller))
    upload = grid.blobs.uploads.offset(upload_id)
    return Response(
        headers={
            "Upload-Offset": str(upload.offset),
            "Upload-Length": str(claim.size),
            "Cache-Control": "no-store",
        }
    )


@router.patch(
    "/uploads/{upload_id}",
    summary="Send bytes of an upload",
    status_code=204,
    responses={201: {"description": "Whole: it is a blob now."}, 204: {"description": "Go on."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
@allow(Access.SENDERS, Scope.SUBMIT)
async def append_upload(
    upload_id: str,
    request: Request,
    grid: GridOf,
    caller: Caller,
    upload_offset: Annotated[int, Header(alias="Upload-Offset", ge=0)],
    job: JobHeader = "",
) -> Response:
    """The raw bytes from ``Upload-Offset`` on. 204: more is to come; 201: promoted."""
    received = 0
    ref = grid.blobs.uploads.claim(upload_id, sight.sender(caller))
    if caller.kind == "node":
        job = await supplies.job_of(grid, caller.node_id, job)

    async def counted() -> AsyncIterator[bytes]:
        nonlocal received
        async for chunk in request.stream():
            received += len(chunk)
            yield chunk

    body = counted()
    try:
        upload = await grid.blobs.uploads.append(upload_id, upload_offset, body)
    except ClientDisconnect:
        # Nobody is left to read this answer; the offset stays for the next request.
        return Response(status_code=400)
    except DistribAIError as error:
        await _drain(body)
        return problems.answer(request, error)
    finally:
        _count(grid, caller, job, ref.sha256, up=received)
    if upload.complete:
        await sight.has_sent(grid, caller, ref)
        return Response(status_code=201, headers={"Upload-Offset": str(upload.offset)})
    return Response(status_code=204, headers={"Upload-Offset": str(upload.offset)})


@router.get(
    "/{sha256}",
    summary="Fetch a blob",
    response_class=Response,
    responses=RANGES,
)
@allow(Access.READERS)
async def fetch_blob(
    sha256: str,
    request: Request,
    grid: GridOf,
    caller: Caller,
    job: JobHeader = "",
    follow: FollowHeader = "",
) -> Response:
    """The bytes, or one ``Range`` of them. Hash them again: the name is the promise."""
    ref = await _readable(grid, caller, sha256, job)
    return await blob_response(
        request,
        grid.blobs,
        ref,
        sent=lambda n: _count(grid, caller, job, sha256, down=n),
        presigner=grid.presigner if follow else None,
    )


@router.post("/{sha256}/fetched", summary="Say what came from the object store", status_code=204)
@allow(Access.READERS)
async def say_fetched(
    sha256: str, body: Fetched, grid: GridOf, caller: Caller, job: JobHeader = ""
) -> None:
    """For the job's byte accounts: a node was sent to the object store, and this many bytes of the
    blob came from there in one answer. Accounts' bytes count to no job."""
    ref = await _readable(grid, caller, sha256, job)
    if body.bytes > ref.size:
        raise UsageError(
            "usage.invalid",
            f"The blob has {ref.size} bytes, so {body.bytes} cannot have come in one answer.",
            "Say what came of each answer by itself.",
            field="bytes",
        )
    _count(grid, caller, job, sha256, down=body.bytes)


@router.head(
    "/{sha256}", summary="Whether a blob is there", response_class=Response, responses=RANGES
)
@allow(Access.READERS)
async def probe_blob(
    sha256: str, request: Request, grid: GridOf, caller: Caller, job: JobHeader = ""
) -> Response:
    """Its size and entity tag."""
    ref = await _readable(grid, caller, sha256, job)
    return await blob_response(request, grid.blobs, ref)


async def _readable(grid: Grid, caller: Principal, sha256: str, job: str) -> BlobRef:
    """A blob that is here and that the caller may read.

    Raises:
        NotFound: ``blob.unknown``.
    """
    if not await sight.may_read(grid, caller, sha256, job):
        raise no_blob(sha256)
    return BlobRef(sha256, await grid.blobs.size(sha256))


async def _drain(body: AsyncIterator[bytes]) -> None:
    left = DRAIN
    try:
        async for chunk in body:
            left -= len(chunk)
            if left < 0:
                return
    except ClientDisconnect:
        return


def _count(
    grid: Grid, caller: Principal, job: str, sha256: str, up: int = 0, down: int = 0
) -> None:
    """Only what moves between nodes and this process counts to a job."""
    if caller.kind == "node" and (up or down):
        kind = "delta" if up else "other"  # unless the blob is known by another kind
        traffic.count(grid, job, caller.node_id, kind, up, down, sha256)
