"""Certificates for nodes, in grids that ask for them."""

from __future__ import annotations

from fastapi import APIRouter, Response

from distribai.api import certificates as api
from distribai.orchestrator.fleet import certification
from distribai.orchestrator.http.security import Access, GridOf, allow

router = APIRouter(prefix="/certificates", tags=["certificates"])


@router.get("/challenge", summary="A challenge for a node")
@allow(Access.PUBLIC)
async def challenge(grid: GridOf, response: Response) -> api.Challenge:
    """Something fresh, which a node's key signs to get a certificate. 404 where the grid asks its
    nodes for none."""
    response.headers["Cache-Control"] = "no-store"
    return api.Challenge(challenge=await certification.challenge(grid))


@router.post("", summary="A certificate for a node")
@allow(Access.PUBLIC)
async def certify(body: api.CertificateBody, grid: GridOf) -> api.Certificate:
    """For a node that may join: its key vouches for the request, and a key that is new to the grid
    brings an invite. It is what the nodes' stream asks for; the HTTP interface never does."""
    made = await certification.certify(
        grid,
        certification.Wanted(
            bytes.fromhex(body.public_key),
            body.challenge,
            body.request,
            bytes.fromhex(body.signature),
            body.invite,
        ),
    )
    return api.Certificate(certificate=made.certificate, lifetime_s=made.lifetime_s)
