"""A node's standing, and the operator's orders to it.

Standing changes on the operator's word, or when a node fails what others can (``core.standing``).
Whoever is quarantined or banned loses its tasks and its session at once; one that is quarantined
knocks again by itself, so that a pardon is all it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from distribai.core.standing import QUARANTINE_JOBS, WINDOW_S, verdict
from distribai.core.states import STANDING, Intent, Liveness, Standing
from distribai.core.text import MAX_REASON, clean
from distribai.errors import Conflict, NotFound
from distribai.orchestrator import events
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet.liveness import bar, release_node
from distribai.orchestrator.fleet.tokens import BARRED
from distribai.orchestrator.rounds import tasks
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import fleet, sessions

VERBS: Final[Mapping[str, Standing]] = {
    "quarantine": Standing.QUARANTINED,
    "trust": Standing.TRUSTED,
    "ban": Standing.BANNED,
    "pardon": Standing.PROBATION,
}
"""What the operator may do to a node's standing."""

ORDERS: Final[Mapping[str, Intent]] = {
    "pause": Intent.PAUSE,
    "resume": Intent.CONTRIBUTE,
    "drain": Intent.DRAIN,
}
"""What the operator may tell a node to do."""


async def set_standing(grid: Grid, node_id: str, verb: str, why: str, by: str) -> None:
    """Do one of :data:`VERBS` to a node; one that stands there already is left as it is.

    Raises:
        NotFound: ``node.unknown``.
        Conflict: ``node.standing``: it does not lead there, a ban only to a pardon for instance.
    """
    new = VERBS[verb]
    async with grid.db.write() as tx:
        node = await _lock(tx, node_id)
        if node.standing == new:
            return
        if new not in STANDING[Standing(node.standing)]:
            raise Conflict(
                "node.standing",
                f"Node {node.name or node.id} is {node.standing}: it cannot be {new.value}.",
                f"Pardon it first: distribai nodes pardon {node.id[:13]} --why ...",
            )
        await _write(tx, node, new, clean(why, MAX_REASON), by)
    await _part(grid, node_id, new)


async def order(grid: Grid, node_id: str, verb: str, by: str) -> None:
    """Do one of :data:`ORDERS`: it holds until the next one, over restarts of either side; a node
    that has left as it was told is free of it.

    Raises:
        NotFound: ``node.unknown``.
        Conflict: ``node.standing``: the node is gone, and could not be told to leave.
    """
    new = ORDERS[verb]
    async with grid.db.write() as tx:
        node = await _lock(tx, node_id)
        if node.ordered == new:
            return
        if new is Intent.DRAIN and node.liveness == Liveness.OFFLINE:
            raise Conflict(
                "node.standing",
                f"Node {node.name or node.id} is offline: there is nothing for it to finish.",
                f"Keep it away: distribai nodes pause {node.id[:13]}",
            )
        await fleet.change_node(tx, node_id, ordered=new.value)
        kind = f"node.{'resumed' if new is Intent.CONTRIBUTE else f'{verb}d'}"
        if new is Intent.DRAIN:
            kind = "node.draining"
        await events.record(tx, kind, node_id=node_id, data={"by": by})
    grid.wake.set()


async def judge(grid: Grid) -> bool:
    """Quarantine the nodes that fail what others can; whether there was one."""
    async with grid.db.read() as tx:
        since = tx.now - WINDOW_S
        suspects = await fleet.suspects(tx, since, QUARANTINE_JOBS)
        guilty = {n: why for n in suspects if (why := await _guilt(tx, n, since))}
        stale = await fleet.any_failure_before(tx, since - WINDOW_S)
    if stale:
        async with grid.db.write() as tx:
            await fleet.forget_failures(tx, since)
    for node_id, why in guilty.items():
        async with grid.db.write() as tx:
            node = await _lock(tx, node_id)
            if Standing.QUARANTINED not in STANDING[Standing(node.standing)]:
                continue
            await _write(tx, node, Standing.QUARANTINED, clean(why, MAX_REASON), "the grid")
        await _part(grid, node_id, Standing.QUARANTINED)
    return bool(guilty)


async def _guilt(tx: Tx, node_id: str, since: float) -> str:
    """Why the node is to be quarantined; empty when it is not."""
    rows = await fleet.failures_since(tx, since, node_id)
    failed = {r.job_id: f"{r.reason} [{r.code}]" for r in rows}
    guilty, why = verdict(failed, await fleet.others_could(tx, failed.keys(), node_id))
    return why if guilty else ""


async def _write(tx: Tx, node: AnyRow, new: Standing, why: str, by: str) -> None:
    await fleet.change_node(
        tx, node.id, standing=new.value, standing_reason=why, standing_at=tx.now
    )
    if new in BARRED:
        await sessions.end_sessions(tx, node.id)
    await events.record(
        tx,
        f"node.{new.value}",
        node_id=node.id,
        data={"by": by, "reason": why, "before": node.standing},
    )


async def _part(grid: Grid, node_id: str, new: Standing) -> None:
    """Take away what a node has that is not to have it any more. Its stream may be another
    replica's, which ends it when it hears of the node next."""
    if new in BARRED:
        async with grid.db.read() as tx:
            bar(grid, await fleet.nodes_by_id(tx, [node_id]))
        await release_node(grid, node_id, f"its node is {new.value}", code=tasks.LET_GO)
    grid.wake.set()


async def _lock(tx: Tx, node_id: str) -> AnyRow:
    node = await fleet.lock_node(tx, node_id)
    if node is None:
        raise NotFound(
            "node.unknown",
            f"There is no node {node_id[:80]}.",
            "`distribai nodes list` lists all nodes.",
        )
    return node
