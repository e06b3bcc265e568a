"""What a caller may see of what is not a row of its own: blobs, uploads, reasons."""

from __future__ import annotations

from dataclasses import replace

from distribai.core.forecast import Forecast
from distribai.core.people import Principal
from distribai.core.spec import BlobRef
from distribai.core.why import CODES, Reason
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import supplies
from distribai.store.blobs import blob_key
from distribai.store.statements import holdings, snapshots

OF_NODES = frozenset({"degraded", "session", "paused", "drain"})
"""Reasons that call a node by its name, which is its owner's to tell."""


OPERATORS_ALONE = (
    "distribai job accept",
    "distribai nodes pardon",
    "distribai nodes resume",
)
"""What only an operator can do, as advice names it."""

ASK = "Ask the grid's operator: only an operator can change it."
MORE_MACHINES = "More machines must join, or workers_min in the job's recipe be smaller."


def sender(caller: Principal) -> str:
    """By whom an upload is found again: the account, whichever of its keys it uses, or the node."""
    return caller.node_id or caller.account_id


async def may_name(grid: Grid, caller: Principal, ref: BlobRef) -> bool:
    """Whether the caller may name a blob without sending its bytes: operators any, others what they
    have sent before; a node what this process remembers of that."""
    if caller.kind == "node":
        return grid.stock.has_brought(caller.node_id, ref.sha256)
    if caller.operator:
        return True
    async with grid.db.read() as tx:
        return bool(await holdings.has_uploaded(tx, caller.account_id, [ref.sha256]))


async def has_sent(grid: Grid, caller: Principal, ref: BlobRef) -> None:
    """The caller has sent all bytes of a blob, and may name it from now on, as operators may
    anyway. A snapshot that was let go is an account's upload like any other from then on; what a
    node brings is named by its report."""
    if caller.kind == "node":
        grid.stock.bring(caller.node_id, ref.sha256)
        return
    async with grid.db.write() as tx:
        await snapshots.forget(tx, [ref.sha256], tx.now)
        if not caller.operator:
            await holdings.add_upload(tx, caller.account_id, ref.sha256, ref.size)


async def may_read(grid: Grid, caller: Principal, sha256: str, job_id: str = "") -> bool:
    """Whether the caller may fetch a blob: operators any, nodes what their work needs (``job_id``
    is the job that they say it is for), others what they have sent and what jobs have made that
    they may look at.

    Raises:
        NotFound: ``blob.unknown``: nothing can go by that name.
        Unavailable: ``blob.store`` or ``grid.database``.
    """
    blob_key(sha256)
    if caller.kind == "node":
        return await supplies.may_fetch(grid, caller.node_id, sha256, job_id)
    organizations = caller.sees()
    if organizations is None:
        return True
    async with grid.db.read() as tx:
        if await holdings.has_uploaded(tx, caller.account_id, [sha256]):
            return True
        return await holdings.blob_of_jobs(tx, sha256, organizations)


async def told_to(grid: Grid, caller: Principal, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """Reasons without what is not the caller's to know, and with advice for the caller: of other
    organizations' jobs and of others' nodes only what kind of reason it is, once."""
    organizations = caller.sees()
    if organizations is None:
        return reasons
    reasons = tuple(_advised(r) for r in reasons)
    async with grid.db.read() as tx:
        ids = {r.job_id for r in reasons if r.job_id}
        own = await holdings.jobs_among(tx, ids, organizations)
    told = [r if _plain(r, own) else Reason(r.code, CODES[r.code]) for r in reasons]
    return tuple(dict.fromkeys(told))


async def forecast_for(grid: Grid, caller: Principal, found: Forecast) -> Forecast:
    """A forecast in which others' nodes have no id; operators see all."""
    if caller.operator:
        return found
    async with grid.db.read() as tx:
        own = await holdings.nodes_among(tx, {n.node_id for n in found.nodes}, caller.account_id)
    return replace(
        found,
        nodes=tuple(n if n.node_id in own else replace(n, node_id="") for n in found.nodes),
    )


def _advised(reason: Reason) -> Reason:
    """A reason with advice that others than operators can follow."""
    if reason.code == "workers":
        return replace(reason, hint=MORE_MACHINES)
    if any(command in reason.hint for command in OPERATORS_ALONE):
        return replace(reason, hint=ASK)
    return reason


def _plain(reason: Reason, own: set[str]) -> bool:
    if reason.job_id:
        return reason.job_id in own
    return not (reason.nodes and reason.code in OF_NODES)
