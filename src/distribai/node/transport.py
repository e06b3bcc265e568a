"""How the link reaches the orchestrator: a seam of five methods, so that tests can cut it.

A :class:`Transport` is asked for a new :class:`Connection` each time; a connection ends once and is
never used again. ``read`` returns None when the other side has ended it in order. Everything that
breaks it raises :class:`ConnectionLost`, from whichever call notices first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from distribai.errors import ProtocolMismatch, Unavailable
from distribai.node.certificate import Certificate
from distribai.node.trust import Trust
from distribai.tls import GRID_NAME
from distribai.wire.joinlink import is_loopback
from distribai.wire.options import CLIENT_OPTIONS
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import NodeServiceStub


class ConnectionLost(Exception):  # internal to the link: it reconnects
    """The connection broke; its text says how, for the log. ``hint`` is what to try, where the way
    it broke says more than that nobody is there."""

    def __init__(self, how: str, hint: str = "") -> None:
        super().__init__(how)
        self.hint = hint


class Connection(Protocol):
    """One stream, as the node sees it."""

    async def read(self) -> pb.OrchestratorMessage | None:
        """The next message; None at an orderly end."""
        ...

    async def write(self, message: pb.NodeMessage) -> None:
        """Send a message; returns when it is on its way, not when it has arrived."""
        ...

    async def end(self) -> None:
        """Say that nothing more will be written; the other side then ends the stream."""
        ...

    async def close(self) -> None:
        """Drop the stream and free it; again is allowed, and it never fails."""
        ...


class Transport(Protocol):
    """Makes connections."""

    async def connect(self) -> Connection:
        """A new stream. A refused connection may show only at its first read."""
        ...


class GrpcTransport:
    """Streams over gRPC to ``host:port``, each over a connection of its own; with TLS if ``trust``
    says whom to believe, and with ``certificate`` where the grid asks for one.

    A fresh channel per stream costs a handshake per reconnect and spares gRPC's own reconnect
    backoff, which would add to the link's. gRPC ends a channel when nothing refers to it any more,
    not when it is closed, and one that failed goes on trying until then. So a connection lets go of
    its channel when it is closed, and no exception that it raises holds on to it.
    """

    def __init__(
        self, address: str, trust: Trust | None = None, certificate: Certificate | None = None
    ) -> None:
        self._address = address
        self._trust = trust
        self._certificate = certificate
        proxy = () if not is_loopback(address) else (("grpc.enable_http_proxy", 0),)
        self._options = (*CLIENT_OPTIONS, *proxy, ("grpc.use_local_subchannel_pool", 1))

    async def connect(self) -> Connection:
        """A new stream; it is opened in the background.

        Raises:
            Integrity: ``grid.ca``: the grid's CA is another one than the join link names.
            NotAllowed: the grid signs no certificate for this node, as :meth:`Certificate.shown`.
        """
        channel = await self._channel()
        stub = NodeServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        doubt = (lambda: None) if self._certificate is None else self._certificate.doubt
        plain = self._trust is None or self._trust.plain
        return _GrpcConnection(channel, stub.Session(), self._address, doubt, plain)

    async def _channel(self) -> grpc.aio.Channel:
        if self._trust is None or self._trust.plain:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        try:
            roots = await self._trust.roots()
            shown = None if self._certificate is None else await self._certificate.shown()
        except Unavailable as problem:
            raise ConnectionLost(problem.message) from problem
        name = (("grpc.ssl_target_name_override", GRID_NAME),) if self._trust.pinned else ()
        credentials = (
            grpc.ssl_channel_credentials(roots)
            if shown is None
            else grpc.ssl_channel_credentials(roots, shown.key_pem, shown.chain_pem)
        )
        return grpc.aio.secure_channel(self._address, credentials, options=(*self._options, *name))


class _GrpcConnection:
    """``doubt`` is called when a connection that came about is cut before the first message;
    ``plain``: it is one without TLS."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: Any,
        address: str,
        doubt: Callable[[], None],
        plain: bool,
    ) -> None:
        self._open: tuple[grpc.aio.Channel, Any] | None = (channel, call)
        self._address = address
        self._doubt = doubt
        self._plain = plain
        self._heard = False

    async def read(self) -> pb.OrchestratorMessage | None:
        try:
            message = await self._call().read()
        except grpc.aio.AioRpcError as problem:
            lost = self._lost(problem)
        else:
            self._heard = True
            if message is grpc.aio.EOF:
                return None
            found: pb.OrchestratorMessage = message
            return found
        raise lost  # here: gRPC's own exception holds its call, and the call its channel

    async def write(self, message: pb.NodeMessage) -> None:
        try:
            await self._call().write(message)
            return
        except grpc.aio.AioRpcError as problem:
            lost = _lost(problem, self._address)
        except (asyncio.InvalidStateError, grpc.aio.UsageError):
            # The stream ended between two writes; the reader knows why.
            lost = ConnectionLost("the stream has ended")
        raise lost

    async def end(self) -> None:
        await self._call().done_writing()

    async def close(self) -> None:
        if self._open is None:
            return
        (channel, call), self._open = self._open, None
        call.cancel()
        await channel.close()

    def _call(self) -> Any:
        if self._open is None:
            raise ConnectionLost("the stream was closed")
        return self._open[1]

    def _lost(self, problem: grpc.aio.AioRpcError) -> Exception:
        lost = _lost(problem, self._address)
        if not self._heard and not _nobody(problem.details() or ""):
            self._doubt()
            if self._plain and isinstance(lost, ConnectionLost):
                lost.hint = lost.hint or OTHER_LINK
        return lost


_WORDS = (
    ("connection refused", "nothing listens at {at}"),
    ("http1.x server", "what listens at {at} is no gRPC port: it may be the grid's web address"),
    ("wrong_version_number", "{at} speaks no TLS, which the join link promises"),
    ("certificate has expired", "the certificate of {at} has expired"),
    ("certificate_verify_failed", "{at} has not the certificate that the join link promises"),
    ("handshake failed", "no TLS connection to {at} comes about"),
    ("resolving", "the name of {at} is not known on this machine"),
    ("lookup", "the name of {at} is not known on this machine"),
    ("unreachable", "there is no way to {at} from this network"),
    ("no route", "there is no way to {at} from this network"),
    ("timed out", "{at} does not answer"),
    ("timeout", "{at} does not answer"),
    ("reset by peer", "{at} has cut the connection"),
    ("socket closed", "{at} has cut the connection"),
    ("goaway", "{at} has closed the connection"),
)
"""What gRPC's own words mean (a part of them in lower case)."""

OTHER_LINK = (
    "The grid's channel may be another one than the join link says: TLS was turned on or off, or "
    "its certificate is a new one. Ask the operator for the join link of now, and start the node "
    'once with it: distribai node start --join "LINK"'
)
"""What to try where somebody listens, but will not talk as the join link promises."""

_OTHERWISE = ("http1.x server", "wrong_version_number", "certificate_verify_failed")
"""Part of what gRPC says then."""

_NO_CONNECTION = ("failed to connect to remote host", "resolving", "lookup")


def _nobody(details: str) -> bool:
    """Whether gRPC says that it came to no connection at all: then TLS has refused nothing."""
    said = details.lower()
    return any(part in said for part in _NO_CONNECTION)


def _lost(problem: grpc.aio.AioRpcError, address: str) -> Exception:
    if problem.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolMismatch(
            "protocol.version",
            f"What answers at {address} is not a DistribAI orchestrator of this version.",
            "Check the join link's address, or upgrade DistribAI: pip install -U distribai",
        )
    details = problem.details() or ""
    hint = OTHER_LINK if any(part in details.lower() for part in _OTHERWISE) else ""
    return ConnectionLost(in_words(problem.code().name, details, address), hint)


def in_words(code: str, details: str, address: str) -> str:
    """Why there is no connection to ``address``, for people; gRPC's own words where they say
    something new."""
    said = details.lower()
    for part, words in _WORDS:
        if part in said:
            return words.format(at=address)
    return f"no connection to {address} ({code.lower()}: {details or 'no reason given'})"
