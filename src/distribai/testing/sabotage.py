"""Taking out one protection of this process, to prove that a test would notice if it were gone.

Work counts exactly once for two reasons, either of which suffices alone: the *fence* (a report
counts only for the attempt, node and state that the task is in) and the *submission key* (accepted
work has its task's id as primary key). A chaos test that passes proves something only if it fails
with both of them out, so :func:`remove` takes them out, one by one. For tests alone, and for a
process of their own: nothing is put back.

The fence also stands for what the orchestrator remembers of a report that it has taken already.
With both out, a report that comes again before its round merges ends the orchestrator (no merge
takes a task twice), and one that comes later has its samples trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import insert, text

from distribai.core.plain import fingerprint, to_plain
from distribai.core.states import TaskState
from distribai.core.tasks import Outcome
from distribai.orchestrator import main as orchestrator
from distribai.orchestrator.rounds import results
from distribai.store import migrate as migration
from distribai.store.engine import AnyRow, Database, Tx
from distribai.store.statements import submissions, work
from distribai.store.tables import submissions as table


def remove(name: str) -> None:
    """Take out the protection ``name`` of :data:`PROTECTIONS`, for as long as this process lives.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in PROTECTIONS:
        raise ValueError(f"there is no protection {name!r}; there are {', '.join(PROTECTIONS)}")
    PROTECTIONS[name]()


def _without_fence() -> None:
    honest = results._take  # private on purpose: nothing but this may reach around it

    async def take(
        tx: Tx, task: AnyRow, node_id: str, outcome: Outcome, signature: bytes
    ) -> results.Answer:
        """Take in any report of finished work, whoever's attempt it was, however often it came."""
        if outcome.status == "failed":
            return await honest(tx, task, node_id, outcome, signature)
        await work.change_task(
            tx,
            task.id,
            state=TaskState.SUBMITTED.value,
            node_id=node_id,
            attempt=outcome.attempt,
            outcome=to_plain(outcome),
            outcome_hash=fingerprint(outcome),
            signature=signature,
            submitted_at=tx.now,
            lease_until=None,
            progress=None,
        )
        return results.LATER

    results._take = take


def _without_submission_key() -> None:
    async def add_submission(tx: Tx, **values: Any) -> bool:
        await tx.run(insert(table).values(**values))
        return True

    async def never(tx: Tx, task_id: str) -> bool:
        return False

    async def migrate(db: Database) -> None:
        await migration.migrate(db)
        await drop_submission_key(db)

    submissions.add_submission = add_submission
    submissions.has_submission = never
    orchestrator.migrate = migrate  # type: ignore[attr-defined]  # the name that it calls


async def drop_submission_key(db: Database) -> None:
    """Take the primary key from the table of accepted work. A second call changes nothing."""
    async with db.write() as tx:
        if tx.dialect == "postgresql":
            await tx.run(text("ALTER TABLE submissions DROP CONSTRAINT IF EXISTS pk_submissions"))
            return
        await tx.run(text("CREATE TABLE keyless AS SELECT * FROM submissions"))
        await tx.run(text("DROP TABLE submissions"))
        await tx.run(text("ALTER TABLE keyless RENAME TO submissions"))


PROTECTIONS: Mapping[str, Callable[[], None]] = {
    "fence": _without_fence,
    "submission-key": _without_submission_key,
}
"""What can be taken out, by name."""
