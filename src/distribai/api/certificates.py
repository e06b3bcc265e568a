"""Requests and answers about nodes' certificates."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from distribai.api.answers import Answer


class CertificateBody(BaseModel):
    """What a node's key vouches for: the grid's challenge and a request (PKCS #10 in PEM, for a
    P-256 key of the node's own making). Keys and signatures are in hexadecimal digits; ``invite``
    is for a key that is new to the grid."""

    model_config = ConfigDict(extra="forbid")

    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    challenge: Annotated[str, Field(min_length=1, max_length=2048)]
    request: Annotated[str, Field(min_length=1, max_length=4096)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    invite: Annotated[str, Field(max_length=200)] = ""


class Challenge(Answer):
    """Something fresh, to be signed within two minutes."""

    challenge: str


class Certificate(Answer):
    """A node's certificate (PEM), and for how many seconds from now it is good."""

    certificate: str
    lifetime_s: float
