"""The grid's machines."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from distribai.api import answers
from distribai.core.plain import to_plain
from distribai.orchestrator.context import Grid
from distribai.orchestrator.fleet import queries, standing
from distribai.orchestrator.fleet import why as nodes
from distribai.orchestrator.http.jobs import ReasonBody
from distribai.orchestrator.http.parameters import Cursor, Limit
from distribai.orchestrator.http.security import Caller, GridOf

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get("", summary="List nodes", response_model=answers.Page[answers.NodeRecord])
async def list_nodes(grid: GridOf, limit: Limit = 1000, cursor: Cursor = "") -> Any:
    """Nodes that ever joined, by id."""
    return to_plain(await queries.page_nodes(grid, limit, cursor))


@router.post("/{ref}/pause", summary="Pause a node")
async def pause(ref: str, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It stands still before its next step, keeps what it has and gets nothing new, until it is
    resumed; over restarts of either side."""
    return await _order(grid, ref, "pause", caller.kind)


@router.post("/{ref}/resume", summary="Resume a node")
async def resume(ref: str, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It works again, unless its owner has paused it too."""
    return await _order(grid, ref, "resume", caller.kind)


@router.post("/{ref}/drain", summary="Let a node finish and leave")
async def drain(ref: str, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It finishes what it has and leaves. Started again it is welcome."""
    return await _order(grid, ref, "drain", caller.kind)


@router.post("/{ref}/quarantine", summary="Quarantine a node")
async def quarantine(ref: str, body: ReasonBody, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It loses its tasks and gets none, and moves no bytes, until it is pardoned or trusted."""
    return await _stand(grid, ref, "quarantine", body.why, caller.kind)


@router.post("/{ref}/trust", summary="Trust a node")
async def trust(ref: str, body: ReasonBody, grid: GridOf, caller: Caller) -> answers.NodeState:
    """It gets work, also of jobs that ask for trusted nodes."""
    return await _stand(grid, ref, "trust", body.why, caller.kind)


@router.post("/{ref}/ban", summary="Ban a node")
async def ban(ref: str, body: ReasonBody, grid: GridOf, caller: Caller) -> answers.NodeState:
    """Its key is shut out: it cannot register again until it is pardoned."""
    return await _stand(grid, ref, "ban", body.why, caller.kind)


@router.post("/{ref}/pardon", summary="Pardon a node")
async def pardon(ref: str, body: ReasonBody, grid: GridOf, caller: Caller) -> answers.NodeState:
    """A quarantine or a ban ends: it is on probation, and what it failed before is forgotten."""
    return await _stand(grid, ref, "pardon", body.why, caller.kind)


async def _order(grid: Grid, ref: str, verb: str, by: str) -> answers.NodeState:
    node_id = await nodes.resolve_node(grid, ref)
    await standing.order(grid, node_id, verb, by)
    return answers.NodeState(**to_plain(await queries.node_state(grid, node_id)))


async def _stand(grid: Grid, ref: str, verb: str, why: str, by: str) -> answers.NodeState:
    node_id = await nodes.resolve_node(grid, ref)
    await standing.set_standing(grid, node_id, verb, why, by)
    return answers.NodeState(**to_plain(await queries.node_state(grid, node_id)))
