"""State changes: one outbox row each for programs, and a sentence in the job's log for people."""

from __future__ import annotations

from collections.abc import Mapping

from distribai.core.plain import Plain
from distribai.store import outbox
from distribai.store.engine import Tx
from distribai.store.statements import records

_WARNINGS = ("failed", "rejected", "superseded", "requeued", "abandoned", "declined")


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
    data = data or {}
    await outbox.append(tx, kind, job_id=job_id, task_id=task_id, node_id=node_id, data=data)
    text = sentence(kind, data)
    if not text or not job_id:
        return
    line: dict[str, object] = {
        "level": "warning" if kind.endswith(_WARNINGS) else "info",
        "message": text,
        "job_id": job_id,
        "task_id": task_id,
        "node_id": node_id,
        "fields": {},
    }
    await records.add_logs(tx, [line])


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
        return f"A task ({data['phase']}, round {data['round'] + 1}) {verb}{reason}."
    return ""
