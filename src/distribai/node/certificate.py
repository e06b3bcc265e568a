"""The node's certificate, which some grids ask for on the stream.

A grid of that kind says so in its join link. A node whose link is older finds out: where a
connection is cut before the grid's first word it asks the HTTP interface, which gives a certificate
or says that none are asked for. Each is for a fresh key that lives in memory alone and ends with
the process, so there is no file to guard, to copy or to find out of date, and the machine's clock
is never asked. The next one is got when between 3/5 and 3/4 of the time have passed, by this
process's clock; as long as that fails, the present one is shown.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from typing import NoReturn

import httpx
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from distribai.errors import DistribAIError, Unavailable
from distribai.node.answers import PASSING, error_of
from distribai.node.clock import Clock, full_jitter
from distribai.node.identity import Identity
from distribai.node.trust import Trust
from distribai.tls import CERTIFICATES_PATH
from distribai.wire.joinlink import JoinLink
from distribai.wire.signing import sign_certify

log = structlog.get_logger("distribai.node")

RENEW = (0.6, 0.75)
"""Shares of a certificate's time between which the next one is got: nodes that began together do
not all ask at once, and a quarter of the time is left for further tries."""

RETRY_S, RETRY_CAP_S = 1.0, 300.0
"""The first and the longest bound of the wait for another try."""

_TIMEOUT = httpx.Timeout(30.0, connect=15.0)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a connection shows: private key and certificate (PEM)."""

    key_pem: bytes
    chain_pem: bytes


class Certificate:
    """The certificate of one node for one grid.

    Args:
        trust: whom to believe at the HTTP interface; without TLS no certificate is ever asked for.
        rng: when the next one is got.
    """

    def __init__(
        self, join: JoinLink, trust: Trust, identity: Identity, clock: Clock, rng: random.Random
    ) -> None:
        self._join = join
        self._trust = trust
        self._identity = identity
        self._clock = clock
        self._rng = rng
        self._held: Shown | None = None
        self._renew_at = math.inf
        self._ask = join.certificates
        self._got = asyncio.Event()
        self._lock = asyncio.Lock()

    def doubt(self) -> None:
        """A connection was cut before the grid's first word: the grid may ask for a certificate, or
        for another one (it has ended while the machine slept, or the CA is a new one)."""
        self._ask = not self._trust.plain

    async def shown(self) -> Shown | None:
        """What the next connection shows; None: nothing.

        Raises:
            Unavailable: ``grid.unreachable``: the link says that it needs one, and there is none.
            DistribAIError: why the grid gives this node none: ``node.invite``, ``node.banned``,
                ``node.key``, ``node.certificate``; ``grid.ca``: it is another grid.
        """
        if self._ask:
            try:
                await self.renew()
            except Unavailable as problem:
                if self._held is None and self._join.certificates:
                    raise
                log.info("no new certificate for now", reason=problem.message)
        return self._held

    async def keep(self) -> NoReturn:
        """Get the next certificate before the present one ends, again and again.

        Raises:
            DistribAIError: as :meth:`shown`, but for ``grid.unreachable``, which is tried again.
        """
        waits = full_jitter(self._rng, RETRY_S, RETRY_CAP_S)
        while True:
            await self._got.wait()
            left = self._renew_at - self._clock.monotonic()
            if left > 0:
                await self._clock.sleep(left)
                continue  # another one may have come meanwhile
            try:
                await self.renew()
                waits = full_jitter(self._rng, RETRY_S, RETRY_CAP_S)
            except Unavailable as problem:
                wait = next(waits)
                log.warning("no new certificate", reason=problem.message, again_in_s=round(wait, 1))
                await self._clock.sleep(wait)

    async def renew(self) -> None:
        """Ask the grid for a certificate, and show it from the next connection on; nothing is shown
        where the grid asks for none.

        Raises:
            Unavailable, DistribAIError: as :meth:`shown`.
        """
        async with self._lock:
            began = self._clock.monotonic()
            found = await self._fetch()
            self._ask = False
            if found is None:
                self._held, self._renew_at = None, math.inf
                self._got.clear()
                return
            self._held, lifetime_s = found
            self._renew_at = began + self._rng.uniform(*RENEW) * lifetime_s
            self._got.set()
            log.info("certified", node=self._identity.node_id, good_for_s=round(lifetime_s))

    async def _fetch(self) -> tuple[Shown, float] | None:
        """A certificate for a fresh key and the seconds that it is good for; None: none is asked
        for."""
        try:
            async with httpx.AsyncClient(
                base_url=self._join.http_url,
                timeout=_TIMEOUT,
                trust_env=not self._join.loopback,
                verify=await self._trust.context(),
            ) as http:
                asked = await http.get(f"{CERTIFICATES_PATH}/challenge")
                if asked.status_code == 404:
                    return None
                return await self._answer(http, _text(asked, "challenge"))
        except httpx.TransportError as problem:
            raise _unreachable(str(problem) or type(problem).__name__) from problem

    async def _answer(self, http: httpx.AsyncClient, challenge: str) -> tuple[Shown, float]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._identity.node_id)])
        request = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(name)
            .sign(key, hashes.SHA256())
            .public_bytes(Encoding.PEM)
            .decode()
        )
        signature = sign_certify(self._identity.key, self._join.grid, challenge, request)
        body = {
            "public_key": self._identity.public_key.hex(),
            "challenge": challenge,
            "request": request,
            "signature": signature.hex(),
            "invite": self._join.invite,
        }
        given = await http.post(CERTIFICATES_PATH, json=body)
        chain = _text(given, "certificate").encode()
        lifetime_s = given.json().get("lifetime_s")
        if not isinstance(lifetime_s, (int, float)) or not 0 < lifetime_s < math.inf:
            raise _unreachable("its answer does not say for how long a certificate is good")
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Shown(key_pem, chain), float(lifetime_s)


def _text(answer: httpx.Response, name: str) -> str:
    """One text of a good answer.

    Raises:
        Unavailable: ``grid.unreachable``: it may be a good one later.
        DistribAIError: the grid refuses, and says why.
    """
    if answer.status_code in PASSING:
        raise _unreachable(f"it answered {answer.status_code}")
    if answer.status_code != 200:
        raise _refusal(answer)
    try:
        said = answer.json()
    except ValueError as problem:
        raise _unreachable("its answer is no JSON") from problem
    found = said.get(name) if isinstance(said, dict) else None
    if not isinstance(found, str) or not found:
        raise _unreachable(f"its answer has no {name!r}")
    return found


def _refusal(answer: httpx.Response) -> DistribAIError:
    """The grid's own reason; what is no grid's answer (a proxy's page) may pass."""
    error = error_of(answer)
    return error if "json" in answer.headers.get("Content-Type", "") else _unreachable(str(error))


def _unreachable(why: str) -> Unavailable:
    return Unavailable(
        "grid.unreachable",
        f"The grid gives this node no certificate now: {why}.",
        "See that the join link's HTTP address is reached from this machine.",
    )
