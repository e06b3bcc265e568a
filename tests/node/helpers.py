"""A scripted orchestrator, a blob server with faults, a TCP proxy, and waiting without sleeping."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import uvicorn

from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.core.tasks import Assignment, WeightsRef
from distribai.wire import convert, signing
from distribai.wire.channel import RELIABLE, Channel
from distribai.wire.options import SERVER_OPTIONS
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import (
    NodeServiceServicer,
    add_NodeServiceServicer_to_server,
)

GRID = "grid-1"
CAP_S = 180.0
"""How long any condition may take on a busy machine before the test gives up."""

SPEC = JobSpec(
    "demo", ModelSpec("decoder_transformer", {}), DataSpec(), 100, rounds=RoundSpec(codec_up="fp32")
)
"""Dense on the way up: the scripted child has no error feedback to hand in."""


class NoJitter(random.Random):
    """Waits of full jitter become zero; a heartbeat's become the shortest."""

    def uniform(self, a: float, b: float) -> float:
        return a


async def eventually(condition: Callable[[], object]) -> None:
    """Return once ``condition`` holds; let the loop run meanwhile."""
    async with asyncio.timeout(CAP_S):
        while not condition():  # noqa: ASYNC110 - any condition, not only events
            await asyncio.sleep(0)


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


def assignment(task_id: str = "task_a", attempt: int = 1, **changes: Any) -> Assignment:
    values: dict[str, Any] = {
        "job_id": "job_a",
        "round": 0,
        "phase": "train",
        "spec": SPEC,
        "base": WeightsRef(0, "hash0"),
        "data": None,
        "samples": (SampleRange(0, 8),),
        "steps": 2,
        "params": {"do": "train"},
    }
    return Assignment(task_id=task_id, attempt=attempt, **{**values, **changes})


# ------------------------------------------------------------------ orchestrator


class Stream:
    """One gRPC stream, for a test that speaks for the orchestrator."""

    def __init__(self) -> None:
        self._out: asyncio.Queue[pb.OrchestratorMessage | None] = asyncio.Queue()
        self._in: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()
        self.ended = asyncio.Event()

    def say(self, message: pb.OrchestratorMessage | None) -> None:
        self._out.put_nowait(message)

    async def hear(self) -> pb.NodeMessage:
        return await self._in.get()

    async def serve(self, requests: AsyncIterator[pb.NodeMessage], context: Any) -> None:
        async def listen() -> None:
            async for message in requests:
                self._in.put_nowait(message)
            self._out.put_nowait(None)  # who has no more to say is let go

        listener = asyncio.ensure_future(listen())
        try:
            while (message := await self._out.get()) is not None:
                await context.write(message)
        finally:
            listener.cancel()
            self.ended.set()


class ScriptedOrchestrator(NodeServiceServicer):
    """A real gRPC server whose streams a test plays."""

    def __init__(self) -> None:
        self._streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        add_NodeServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def Session(self, requests: Any, context: Any) -> None:  # noqa: N802
        stream = Stream()
        self._streams.put_nowait(stream)
        await stream.serve(requests, context)

    async def accept(self) -> Stream:
        return await self._streams.get()

    async def __aenter__(self) -> ScriptedOrchestrator:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(grace=None)


class Peer:
    """The orchestrator's half of a session over any stream that can ``say`` and ``hear``."""

    def __init__(self, heartbeat_s: float = 10.0) -> None:
        self.channel: Channel[pb.OrchestratorMessage] = Channel()
        self.heartbeat_s = heartbeat_s
        self.session_id = "ses_1"
        self.stream: Any = None
        self.registered: list[pb.RegisterSession] = []

    async def challenge(self, stream: Any, **changes: Any) -> pb.RegisterSession:
        self.stream = stream
        values = {"nonce": b"n" * 32, "grid_id": GRID, "protocol_min": 1, "protocol_max": 1}
        stream.say(pb.OrchestratorMessage(challenge=pb.Challenge(**{**values, **changes})))
        register = (await stream.hear()).register
        signing.verify_register(register.public_key, register.signature, GRID, b"n" * 32)
        self.registered.append(register)
        return register

    async def welcome(self, stream: Any, *, resume: bool = False, **ack: Any) -> pb.RegisterSession:
        """Challenge and accept; a resumed session gets what it has missed."""
        register = await self.challenge(stream)
        if resume:
            assert register.resume_session == self.session_id
            self.channel.resume(register.received)
        else:
            self.channel = Channel()
        stream.say(
            pb.OrchestratorMessage(
                register_ack=pb.RegisterAck(
                    protocol=1,
                    node_id="node_x",
                    session_id=self.session_id,
                    session_token=f"token-{len(self.registered)}",
                    resumed=resume,
                    received=self.channel.received,
                    heartbeat_s=self.heartbeat_s,
                    **ack,
                )
            )
        )
        for seq, message in self.channel.unacked():
            self._put(seq, message)
        return register

    def say(self, **body: Any) -> None:
        message = pb.OrchestratorMessage(**body)
        reliable = message.WhichOneof("body") in RELIABLE
        self._put(self.channel.number(message, reliable=reliable), message)

    def _put(self, seq: int, message: pb.OrchestratorMessage) -> None:
        envelope = pb.OrchestratorMessage(seq=seq, ack=self.channel.received)
        envelope.MergeFrom(message)
        self.stream.say(envelope)

    def assign(self, task: Assignment, device: int = 0) -> None:
        self.say(task_assign=convert.assignment_to_wire(task, device))

    def acknowledge(self, result: pb.TaskResult) -> None:
        self.say(
            task_result_ack=pb.TaskResultAck(
                task_id=result.task_id, attempt=result.attempt, counted=True
            )
        )

    async def hear(self, *kinds: str) -> Any:
        """The body of the node's next message of one of ``kinds``; others are let pass."""
        async with asyncio.timeout(CAP_S):
            while True:
                message = await self.stream.hear()
                verdict = self.channel.on_receive(message.seq, message.ack)
                body = message.WhichOneof("body")
                if verdict == "deliver" and body in kinds:
                    return getattr(message, body)


# ------------------------------------------------------------------ blobs over HTTP


class BlobServer:
    """The HTTP side of the blob contract as an ASGI application with faults to order.

    ``cut_download`` and ``cut_upload``: bytes after which the next transfers break off, one entry
    each; ``stall_download``: bytes after which nothing comes any more. ``statuses``: answers to
    give instead, first come first served; ``retry_after`` goes with them; ``after_cut``: the
    answers from the cut of an upload on. ``store``: the address of an object store to send on to
    who can follow; ``fetched``: (job, SHA-256, bytes) that were said to have come from there.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[dict[str, Any], bytearray]] = {}
        self.cut_download: list[int] = []
        self.stall_download: list[int] = []
        self.cut_upload: list[int] = []
        self.statuses: list[int] = []
        self.retry_after = ""
        self.after_cut: list[int] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.ignore_range = False
        self.lie: dict[str, bytes] = {}
        self.store = ""
        self.fetched: list[tuple[str, str, int]] = []
        self.url = ""

    def put(self, data: bytes) -> BlobRef:
        ref = ref_of(data)
        self.blobs[ref.sha256] = data
        return ref

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        method, path = scope["method"], scope["path"]
        self.requests.append((method, path, headers))
        if self.statuses:
            wait = {"retry-after": self.retry_after} if self.retry_after else None
            await self._answer(send, self.statuses.pop(0), b'{"detail": "ordered"}', wait)
        elif path == "/api/v1/blobs":
            await self._begin(receive, send)
        elif path.endswith("/fetched"):
            said = json.loads(await self._body(receive))
            job, sha256 = headers["x-distribai-job"], path.split("/")[-2]
            self.fetched.append((job, sha256, said["bytes"]))
            await self._answer(send, 204)
        elif self.store and headers.get("x-distribai-follow") == "1":
            sent_on = {"Location": f"{self.store}{path}?X-Amz-Signature=abc", "ETag": '"x"'}
            await self._answer(send, 307, headers=sent_on)
        elif path.startswith("/api/v1/blobs/uploads/"):
            await self._upload(method, path.rsplit("/", 1)[1], headers, receive, send)
        else:
            await self._download(path.rsplit("/", 1)[1], headers, receive, send)

    async def _answer(
        self, send: Any, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        pairs = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
        pairs.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    async def _body(self, receive: Any) -> bytes:
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                return body

    async def _begin(self, receive: Any, send: Any) -> None:
        wanted = json.loads(await self._body(receive))
        if wanted["sha256"] in self.blobs:
            await self._answer(send, 200, b"{}")
            return
        name = f"up_{len(self.uploads)}"
        self.uploads[name] = (wanted, bytearray())
        await self._answer(send, 201, json.dumps({"upload_id": name, "offset": 0}).encode())

    async def _upload(
        self, method: str, name: str, headers: dict[str, str], receive: Any, send: Any
    ) -> None:
        if name not in self.uploads:
            await self._answer(send, 404)
            return
        wanted, data = self.uploads[name]
        if method == "HEAD":
            await self._answer(send, 204, headers={"Upload-Offset": str(len(data))})
            return
        if int(headers["upload-offset"]) != len(data):
            await self._answer(send, 409)
            return
        limit = self.cut_upload.pop(0) if self.cut_upload else None
        while True:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            data.extend(part.get("body", b""))
            if limit is not None and len(data) >= limit:
                del data[limit:]
                self.statuses += self.after_cut
                raise ConnectionAbortedError("ordered")
            if not part.get("more_body"):
                break
        if len(data) < wanted["size"]:
            await self._answer(send, 204)
        elif ref_of(bytes(data)).sha256 != wanted["sha256"]:
            problem = {"detail": "other bytes", "code": "blob.hash", "hint": "look"}
            await self._answer(send, 422, json.dumps(problem).encode())
        else:
            self.blobs[wanted["sha256"]] = bytes(data)
            del self.uploads[name]
            await self._answer(send, 201)

    async def _download(
        self, sha256: str, headers: dict[str, str], receive: Any, send: Any
    ) -> None:
        data = self.lie.get(sha256, self.blobs.get(sha256))
        if data is None:
            await self._answer(send, 404, b'{"detail": "no such blob", "code": "blob.unknown"}')
            return
        status, more, start = 200, {}, 0
        if "range" in headers and not self.ignore_range:
            start = int(headers["range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                await self._answer(send, 416)
                return
            status, more = 206, {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        if not self.cut_download and not self.stall_download:
            await self._answer(send, status, data[start:], more)
            return
        stalls = bool(self.stall_download)
        cut = (self.stall_download or self.cut_download).pop(0)
        pairs = [(k.encode(), v.encode()) for k, v in more.items()]
        pairs.append((b"content-length", str(len(data) - start).encode()))
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send(
            {"type": "http.response.body", "body": data[start : start + cut], "more_body": True}
        )
        if stalls:
            while (await receive())["type"] != "http.disconnect":
                pass
        raise ConnectionAbortedError("ordered")


@contextlib.asynccontextmanager
async def serving(app: BlobServer) -> AsyncIterator[BlobServer]:
    """Serve ``app`` over HTTP on loopback."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(app, log_level=100, lifespan="off", ws="none", http="h11")
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    await eventually(lambda: server.started)
    try:
        yield app
    finally:
        server.should_exit = True
        server.force_exit = True
        await running
        listener.close()


FAKE_CHILD = Path(__file__).parent / "fake_child.py"
