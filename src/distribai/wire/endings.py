"""Errors to and from ``SessionEnd``."""

from __future__ import annotations

from distribai import errors
from distribai.errors import DistribAIError
from distribai.wire.v1 import distribai_pb2 as pb

_CLASSES: dict[str, type[DistribAIError]] = {
    "node.fenced": errors.Conflict,
    "node.invite": errors.NotAllowed,
    "node.banned": errors.NotAllowed,
    "node.quarantined": errors.NotAllowed,
    "node.certificate": errors.NotAllowed,
    "node.key": errors.NotAllowed,
    "node.unknown": errors.NotFound,
    "auth.forbidden": errors.NotAllowed,
    "auth.invalid": errors.Unauthenticated,
    "protocol.version": errors.ProtocolMismatch,
    "protocol.sequence": errors.ProtocolMismatch,
    "protocol.malformed": errors.ProtocolMismatch,
    "limit.rate": errors.TooMany,
    "internal.fault": errors.InternalFault,
}


def end_of(error: DistribAIError, *, retry: bool) -> pb.SessionEnd:
    """The last message of a session that ``error`` ends."""
    return pb.SessionEnd(code=error.code, message=error.message, hint=error.hint, retry=retry)


def error_of(end: pb.SessionEnd) -> DistribAIError:
    """The error that ended a session; a code of a newer program reads as ``grid.unreachable``."""
    if end.code not in errors.CODES:
        return errors.Unavailable("grid.unreachable", f"{end.message} [{end.code}]", end.hint)
    kind = _CLASSES.get(end.code, errors.Unavailable)
    return kind(end.code, end.message, end.hint)
