"""State changes: one outbox row each for programs, and a sentence in the job's log for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from distribai.core.people import Principal
from distribai.core.plain import Plain
from distribai.core.tasks import works_on
from distribai.store import outbox
from distribai.store.engine import Tx
from distribai.store.outbox import Change
from distribai.store.statements import records

_WARNINGS = ("failed", "rejected", "superseded", "requeued", "abandoned", "declined")


@dataclass(slots=True)
class _Request:
    """Whose request it is, as soon as that is known."""

    actor: Principal | None = None


_request: ContextVar[_Request | None] = ContextVar("request", default=None)


@contextmanager
def request() -> Iterator[None]:
    """What happens in this block is one request, of nobody until :func:`act_as` says whose."""
    before = _request.set(_Request())
    try:
        yield
    finally:
        _request.reset(before)


def act_as(principal: Principal) -> None:
    """From here to the end of the request every event is this account's doing. A node's requests
    are told by its messages, and are no audit's matter; outside of a request this does nothing."""
    current = _request.get()
    if current is not None and principal.kind == "account":
        current.actor = principal


async def record(
    tx: Tx,
    kind: str,
    *,
    job_id: str = "",
    task_id: str = "",
    node_id: str = "",
    data: Mapping[str, Plain] | None = None,
) -> None:
    """Write the event of a change that this transaction makes, and its sentence if it has one."""
    await record_all(tx, [Change(kind, job_id, task_id, node_id, data or {})])


async def record_all(tx: Tx, changes: Sequence[Change]) -> None:
    """Write the events of all changes of one kind or several that this transaction makes."""
    current = _request.get()
    actor = current.actor if current else None
    await outbox.append(
        tx,
        changes,
        account_id=actor.account_id if actor else "",
        key_id=actor.key_id if actor else "",
    )
    lines: list[dict[str, object]] = [
        {
            "level": "warning" if c.kind.endswith(_WARNINGS) else "info",
            "message": text,
            "job_id": c.job_id,
            "task_id": c.task_id,
            "node_id": c.node_id,
            "fields": {},
        }
        for c in changes
        if c.job_id and (text := sentence(c.kind, c.data))
    ]
    await records.add_logs(tx, lines)


def sentence(kind: str, data: Mapping[str, Plain]) -> str:
    """What ``distribai job logs`` says of an event; empty for what happens all the time."""
    subject, _, change = kind.partition(".")
    why = str(data.get("reason") or "").rstrip(".")
    reason = f": {why}" if why else ""
    if subject == "job":
        by = f" by the {data['by']}" if data.get("by") else ""
        if by:
            verb = {"queued": "accepted", "running": "resumed"}.get(change, change)
            return f"The job was {verb}{by}{reason}."
        return f"The job is {change}{reason}."
    if kind == "round.open":
        return f"Round {data['round'] + 1} is open{reason}."
    if kind == "round.merged":
        count = data["submissions"]
        return (
            f"Round {data['round'] + 1} is merged into version {data['version']} "
            f"from {count} submission{'' if count == 1 else 's'}."
        )
    if kind == "round.abandoned":
        return f"Round {data['round'] + 1} is abandoned{reason}."
    if subject == "task" and change in ("requeued", "failed", "rejected", "superseded"):
        verb = "goes back to the queue" if change == "requeued" else f"is {change}"
        phase = str(data["phase"])
        return f"A task ({phase}, {works_on(phase, data['round'])}) {verb}{reason}."
    return ""
