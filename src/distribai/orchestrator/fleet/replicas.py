"""Which replicas are here, for operators: one that is gone shows, and is told once.

Each process of a grid on PostgreSQL holds a leased row that bears its name, and prolongs it as long
as it can write to the database. Nothing depends on it: who does what is decided by the duties'
leases. An embedded database has one process, of which there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distribai.orchestrator import events, places
from distribai.store import leases
from distribai.store.engine import Tx

if TYPE_CHECKING:
    from distribai.orchestrator.context import Grid

SHOWN_S = 3600.0
"""A replica that is gone is shown for so long."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One of them; ``silent_s`` seconds ago its lease ran out (0: it is here)."""

    name: str
    silent_s: float

    @property
    def here(self) -> bool:
        """Whether it is."""
        return not self.silent_s


async def be_here(grid: Grid) -> None:
    """Say that this process is here; to be called well within ``liveness.replica_s``.

    Raises:
        Conflict: ``grid.moved``: the grid is here no more, and who serves it here must end.
        Unavailable: ``grid.database``.
    """
    if grid.db.dialect == "sqlite":
        return
    async with grid.db.write() as tx:
        seconds = grid.settings.liveness.replica_s
        came = await leases.be_here(tx, grid.replica, grid.holder, seconds)
        await places.check_here(tx)  # behind the lease, on which a move waits, or makes this wait
        if came:
            await events.record(tx, "replica.here", data={"replica": grid.replica})


async def leave(grid: Grid, tx: Tx) -> None:
    """This process ends in order."""
    if await leases.forget_replica(tx, grid.replica, grid.holder):
        await events.record(tx, "replica.left", data={"replica": grid.replica})


async def notice(grid: Grid) -> bool:
    """Tell of replicas whose lease has run out, and forget those that are gone for long; for who
    leads. Whether anything changed."""
    if grid.db.dialect == "sqlite":
        return False
    async with grid.db.read() as tx:
        if not await leases.gone_replicas(tx, SHOWN_S):
            return False
    async with grid.db.write() as tx:
        gone = await leases.mark_gone(tx)
        for name in gone:
            await events.record(tx, "replica.gone", data={"replica": name})
        await leases.forget_gone(tx, SHOWN_S)
    return True


async def shown(tx: Tx) -> Sequence[Replica]:
    """Those that are here, and those that are gone for less than :data:`SHOWN_S`, by name."""
    return [
        Replica(name, max(0.0, tx.now - until))
        for name, until in await leases.replicas(tx)
        if tx.now - until < SHOWN_S
    ]


def trouble(replicas: Sequence[Replica]) -> list[str]:
    """A sentence for each that is gone."""
    return [
        f"The replica {r.name} is gone: it has not been heard for {r.silent_s:.0f} s. It was "
        "killed, is frozen, or does not reach the database."
        for r in replicas
        if not r.here
    ]
