"""The grid's machines."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from distribai.api import answers
from distribai.core.plain import to_plain
from distribai.orchestrator.fleet import queries
from distribai.orchestrator.http.security import GridOf

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get("", summary="List nodes", response_model=answers.Listing[answers.NodeRecord])
async def list_nodes(grid: GridOf) -> Any:
    """All nodes that ever joined, the live ones first."""
    return {"items": to_plain(await queries.list_nodes(grid))}
