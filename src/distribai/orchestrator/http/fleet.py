"""The grid's machines."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from distribai.api import answers
from distribai.core.plain import to_plain
from distribai.orchestrator.fleet import queries
from distribai.orchestrator.http.parameters import Cursor, Limit
from distribai.orchestrator.http.security import GridOf

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get("", summary="List nodes", response_model=answers.Page[answers.NodeRecord])
async def list_nodes(grid: GridOf, limit: Limit = 1000, cursor: Cursor = "") -> Any:
    """Nodes that ever joined, by id."""
    return to_plain(await queries.page_nodes(grid, limit, cursor))
