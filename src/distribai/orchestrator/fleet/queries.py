"""What a person may ask about the grid's machines."""

from __future__ import annotations

from collections.abc import Sequence

from distribai import __version__
from distribai.core.devices import Machine
from distribai.core.plain import from_plain
from distribai.core.states import Liveness, TaskState
from distribai.errors import Unavailable
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import replicas
from distribai.orchestrator.fleet.registration import MODE, TRUSTED
from distribai.orchestrator.records import DeviceRecord, GridSummary, NodeRecord, NodeState, Page
from distribai.orchestrator.webhooks.duties import stranded
from distribai.store.engine import AnyRow
from distribai.store.statements import facts, fleet, jobs, watching, work

MOST_NAMED = 5
"""Nodes in trouble that a problem names."""

LIVELINESS = [Liveness.ONLINE.value, Liveness.DEGRADED.value, Liveness.OFFLINE.value]


async def node_state(grid: Grid, node_id: str) -> NodeState:
    """One node as it is now; it must be known."""
    async with grid.db.read() as tx:
        (row,) = await fleet.nodes_by_id(tx, [node_id])
    return NodeState(
        row.id, row.liveness, row.standing, row.intent, row.ordered, row.standing_reason
    )


async def list_nodes(grid: Grid) -> tuple[NodeRecord, ...]:
    """All nodes that ever joined, the live ones first."""
    async with grid.db.read() as tx:
        rows = await fleet.all_nodes(tx)
        leased = await work.tasks_in(tx, (TaskState.LEASED,))
    return _records(sorted(rows, key=lambda r: LIVELINESS.index(r.liveness)), leased)


async def page_nodes(
    grid: Grid, limit: int, cursor: str = "", account_id: str | None = None
) -> Page[NodeRecord]:
    """Nodes by id (of an account, or all), page by page: an order that does not change while
    somebody turns the pages."""
    async with grid.db.read() as tx:
        after = cursor if cursor.isprintable() else ""
        rows = await watching.nodes_page(tx, after, limit + 1, account_id)
        leased = await watching.leased_to(tx, [r.id for r in rows])
    more = len(rows) > limit
    return Page(_records(rows[:limit], leased), rows[limit - 1].id if more else "")


def _records(rows: Sequence[AnyRow], leased: Sequence[AnyRow]) -> tuple[NodeRecord, ...]:
    held: dict[str, list[str]] = {}
    for task in leased:
        held.setdefault(task.node_id, []).append(task.id)
    return tuple(
        NodeRecord(
            id=r.id,
            name=r.name,
            liveness=r.liveness,
            standing=r.standing,
            intent=r.intent,
            software=r.software,
            devices=tuple(DeviceRecord(**d) for d in r.devices),
            joined_at=r.joined_at,
            last_heard_at=r.last_heard_at,
            tasks=tuple(held.get(r.id, ())),
            bytes_up=r.bytes_up,
            bytes_down=r.bytes_down,
            ordered=r.ordered,
            standing_reason=r.standing_reason,
            machine=None if r.machine is None else from_plain(Machine, r.machine),
            account_id=r.account_id,
            intent_reason=r.intent_reason,
        )
        for r in rows
    )


async def knock(grid: Grid) -> None:
    """Return if the database answers.

    Raises:
        Unavailable: ``grid.database``.
    """
    await grid.db.now()


async def summary(grid: Grid, organizations: frozenset[str] | None = None) -> GridSummary:
    """The grid's health; with jobs counted of these organizations alone, where they are given.

    Raises:
        Unavailable: ``grid.database``.
    """
    async with grid.db.read() as tx:
        nodes = await fleet.all_nodes(tx)
        leased = await work.tasks_in(tx, (TaskState.LEASED,))
        counts = await work.count_tasks(tx, (TaskState.QUEUED, TaskState.LEASED))
        by_state = await jobs.count_by_state(tx)
        mode = await facts.get(tx, MODE) or TRUSTED
        shown = by_state if organizations is None else await jobs.count_by_state(tx, organizations)
        here = await replicas.shown(tx)
        now = tx.now
    online = sum(n.liveness == Liveness.ONLINE for n in nodes)
    problems = await _problems(grid, by_state, len(nodes), online)
    problems += tuple(replicas.trouble(here))
    problems += _without_blobs(nodes, named=organizations is None)
    return GridSummary(
        grid_id=grid.grid_id,
        mode=mode,
        software=__version__,
        database=grid.db.dialect,
        ok=not problems,
        problems=problems,
        now=now,
        nodes_online=online,
        nodes_degraded=sum(n.liveness == Liveness.DEGRADED for n in nodes),
        nodes_offline=sum(n.liveness == Liveness.OFFLINE for n in nodes),
        nodes_working=len({t.node_id for t in leased}),
        jobs=shown,
        tasks_queued=counts.get(TaskState.QUEUED, 0),
        tasks_leased=counts.get(TaskState.LEASED, 0),
        replicas=tuple(r.name for r in here if r.here),
    )


def trouble_of(node: AnyRow) -> str:
    """Why a node's blobs do not come through, as it said last; empty when they do."""
    return str((node.machine or {}).get("trouble", ""))


def _without_blobs(nodes: Sequence[AnyRow], named: bool) -> tuple[str, ...]:
    """That nodes have their stream and get no blobs; ``named``: which, and the reason of one."""
    stuck = [n for n in nodes if n.liveness == Liveness.ONLINE and trouble_of(n)]
    if not stuck:
        return ()
    one = len(stuck) == 1
    who = "1 node" if one else f"{len(stuck)} nodes"
    told = (
        f"{who} {'reaches' if one else 'reach'} the grid's stream, but blobs do not come through "
        f"over HTTP, so {'its' if one else 'their'} tasks wait or fail"
    )
    if not named:
        return (f"{told}.",)
    names = ", ".join(f"{n.name} ({n.id[:13]})" for n in stuck[:MOST_NAMED])
    more = f" and {len(stuck) - MOST_NAMED} more" if len(stuck) > MOST_NAMED else ""
    return (f"{told}: {names}{more}. {trouble_of(stuck[0])}. `distribai nodes why` says more.",)


async def _problems(
    grid: Grid, by_state: dict[str, int], nodes: int, online: int
) -> tuple[str, ...]:
    found = []
    if not online and (by_state.get("queued", 0) or by_state.get("running", 0)):
        found.append("There is work, but no node is online.")
    elif nodes and not online:
        found.append("No node is online.")
    try:
        await grid.blobs.exists("0" * 64)
    except Unavailable as problem:
        found.append(problem.message)
    for why in sorted(set(grid.troubles.values())):
        duties = ", ".join(sorted(n for n, text in grid.troubles.items() if text == why))
        found.append(f"It cannot go on with some of its work ({duties}): {why}")
    if away := await stranded(grid):
        found.append(away)
    return tuple(found)
