"""The grid's machines."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from distribai.api import answers
from distribai.core.people import Scope
from distribai.core.plain import to_plain
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import queries, standing
from distribai.orchestrator.http.jobs import ReasonBody
from distribai.orchestrator.http.parameters import Cursor, Limit
from distribai.orchestrator.http.security import Access, Caller, GridOf, SeenNode, allow

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get("", summary="List nodes", response_model=answers.Page[answers.NodeRecord])
@allow(Access.ACCOUNTS)
async def list_nodes(grid: GridOf, caller: Caller, limit: Limit = 1000, cursor: Cursor = "") -> Any:
    """Nodes that ever joined, by id; operators see all, others their own."""
    account = None if caller.operator else caller.account_id
    return to_plain(await queries.page_nodes(grid, limit, cursor, account))


@router.post("/{ref}/pause", summary="Pause a node")
@allow(Access.OPERATORS, Scope.OPERATE)
async def pause(node_id: SeenNode, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It stands still before its next step, keeps what it has and gets nothing new, until it is
    resumed; over restarts of either side."""
    return await _order(grid, node_id, "pause", caller.title)


@router.post("/{ref}/resume", summary="Resume a node")
@allow(Access.OPERATORS, Scope.OPERATE)
async def resume(node_id: SeenNode, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It works again, unless its owner has paused it too."""
    return await _order(grid, node_id, "resume", caller.title)


@router.post("/{ref}/drain", summary="Let a node finish and leave")
@allow(Access.OPERATORS, Scope.OPERATE)
async def drain(node_id: SeenNode, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It finishes what it has and leaves. Started again it is welcome."""
    return await _order(grid, node_id, "drain", caller.title)


@router.post("/{ref}/quarantine", summary="Quarantine a node")
@allow(Access.OPERATORS, Scope.OPERATE)
async def quarantine(
    node_id: SeenNode, body: ReasonBody, grid: GridOf, caller: Caller
) -> answers.NodeState:
    """It loses its tasks and gets none, and moves no bytes, until it is pardoned or trusted."""
    return await _stand(grid, node_id, "quarantine", body.why, caller.title)


@router.post("/{ref}/trust", summary="Trust a node")
@allow(Access.OPERATORS, Scope.OPERATE)
async def trust(
    node_id: SeenNode, body: ReasonBody, grid: GridOf, caller: Caller
) -> answers.NodeState:
    """It gets work, also of jobs that ask for trusted nodes."""
    return await _stand(grid, node_id, "trust", body.why, caller.title)


@router.post("/{ref}/ban", summary="Ban a node")
@allow(Access.OPERATORS, Scope.OPERATE)
async def ban(
    node_id: SeenNode, body: ReasonBody, grid: GridOf, caller: Caller
) -> answers.NodeState:
    """Its key is shut out: it cannot register again until it is pardoned."""
    return await _stand(grid, node_id, "ban", body.why, caller.title)


@router.post("/{ref}/pardon", summary="Pardon a node")
@allow(Access.OPERATORS, Scope.OPERATE)
async def pardon(
    node_id: SeenNode, body: ReasonBody, grid: GridOf, caller: Caller
) -> answers.NodeState:
    """A quarantine or a ban ends: it is on probation, and what it failed before is forgotten."""
    return await _stand(grid, node_id, "pardon", body.why, caller.title)


async def _order(grid: Grid, node_id: str, verb: str, by: str) -> answers.NodeState:
    await standing.order(grid, node_id, verb, by)
    return answers.NodeState(**to_plain(await queries.node_state(grid, node_id)))


async def _stand(grid: Grid, node_id: str, verb: str, why: str, by: str) -> answers.NodeState:
    await standing.set_standing(grid, node_id, verb, why, by)
    return answers.NodeState(**to_plain(await queries.node_state(grid, node_id)))
