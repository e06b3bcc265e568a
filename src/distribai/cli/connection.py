"""How a command finds the orchestrator: flags, DISTRIBAI_URL and DISTRIBAI_TOKEN, files, and last
the credentials that ``orchestrator start`` left for the same user on the same machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from distribai import durable
from distribai.errors import UsageError

if TYPE_CHECKING:
    from distribai.client import Client
    from distribai.config import Home, Settings


@Parameter(name="*")
@dataclass(frozen=True)
class Reach:
    """Where the orchestrator is and as whom to speak."""

    url: Annotated[str | None, Parameter(help="The orchestrator's HTTP address.")] = None
    token: Annotated[
        str | None,
        Parameter(help="A key of your account; better in DISTRIBAI_TOKEN, out of sight."),
    ] = None
    ca: Annotated[str | None, Parameter(help="The grid's CA: a file in PEM, or its SHA-256.")] = (
        None
    )


@dataclass(frozen=True)
class Credentials:
    """What ``orchestrator start`` or ``login`` left. ``state_dir`` says whose token it is: a grid
    keeps its token over restarts, and another grid has another; empty: it came by a login. ``ca``
    is the grid's CA in PEM; empty without TLS, or where the system's authorities vouch for the
    address."""

    url: str
    token: str
    state_dir: str
    ca: str = ""


def read_credentials(home: Home) -> Credentials | None:
    """The credentials file of this home; None when there is none that can be used."""
    return _read(home.credentials)


def _read(path: Path) -> Credentials | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Credentials(
            str(found["url"]),
            str(found["token"]),
            str(found["state_dir"]),
            str(found.get("ca", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_kept(home: Home, state_dir: str) -> Credentials | None:
    """What ``orchestrator start`` left for the grid of that directory, whichever grid the commands
    speak to now."""
    return _read(_kept(home, state_dir))


def write_credentials(home: Home, credentials: Credentials) -> Path:
    """Leave them for this user's other commands, readable by nobody else; where.

    Those of a grid of this machine are kept beside as well: several grids may take turns.

    Raises:
        OSError: a file cannot be written.
    """
    if credentials.state_dir:
        keep_credentials(home, credentials)
    _write(home.credentials, credentials)
    return home.credentials


def keep_credentials(home: Home, credentials: Credentials) -> None:
    """Keep those of a grid of this machine without turning the commands to it.

    Raises:
        OSError: the file cannot be written.
    """
    _write(_kept(home, credentials.state_dir), credentials)


def _kept(home: Home, state_dir: str) -> Path:
    name = hashlib.sha256(state_dir.encode()).hexdigest()[:16]
    return home.credentials.with_name(f"credentials-{name}.json")


def _write(path: Path, credentials: Credentials) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(vars(credentials), file)
    durable.promote(beside, path, point="start.credentials")


def resolve(reach: Reach | None = None) -> Settings:
    """All settings, with the credentials file between the files and the defaults.

    A token found in the credentials file goes to the address found there and to no other.

    Raises:
        UsageError: ``config.invalid``.
    """
    from distribai import config

    flags = (
        {}
        if reach is None
        else {"client.url": reach.url, "client.token": reach.token, "client.ca": reach.ca}
    )
    settings = config.load(flags)
    credentials = read_credentials(settings.home)
    if credentials is None:
        return settings
    source = str(settings.home.credentials)
    if settings["client.url"].source == "default":
        settings = settings.replaced("client.url", credentials.url, source)
    same = settings["client.url"].value.rstrip("/") == credentials.url.rstrip("/")
    if same and settings["client.token"].source == "default":
        settings = settings.replaced("client.token", credentials.token, source)
    if same and credentials.ca and settings["client.ca"].source == "default":
        settings = settings.replaced("client.ca", source, source)
    return settings


def connect(reach: Reach | None) -> Client:
    """A client of the grid that the user means."""
    from distribai.client import Client

    settings = resolve(reach)
    client = settings.client()
    return Client(client.url, client.token, ca=authority(settings))


def login_line(url: str, login: str, ca_pem: str) -> str:
    """What somebody types to log in to a grid whose CA this is ("" for the system's)."""
    from distribai.tls import fingerprint

    pin = f" --ca {fingerprint(ca_pem)}" if ca_pem else ""
    return f"distribai login --url {url}{pin} --token {login}"


def authority(settings: Settings) -> str:
    """The CA (PEM) that the setting ``client.ca`` means; "" for the system's authorities. One that
    is given by its hash is fetched once, and kept in the cache under that hash.

    Raises:
        UsageError: ``config.invalid``: neither a file nor a hash.
        Integrity: ``grid.ca``: the grid has another one.
        Unavailable: ``grid.unreachable``.
    """
    wanted = settings.client().ca
    if not wanted:
        return ""
    from distribai import tls

    if wanted == str(settings.home.credentials):
        found = read_credentials(settings.home)
        return found.ca if found is not None else ""
    path = Path(wanted).expanduser()
    if re.fullmatch(r"[0-9a-f]{64}", wanted.lower()) and not path.is_file():
        pin = wanted.lower()
        kept = settings.home.cache / f"ca-{pin}.pem"
        if kept.is_file():
            return tls.check_pin(kept.read_text(encoding="ascii"), pin, str(kept))
        pem = tls.fetch_ca(settings.client().url.rstrip("/"), pin)
        kept.parent.mkdir(parents=True, exist_ok=True)
        durable.write(kept, pem.encode(), point="client.ca")
        return pem
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(
            "config.invalid",
            f"client.ca is {wanted!r}, which is neither a SHA-256 nor a file that can be read.",
            "Give the orchestrator's `ca-cert`, or the hash after `ca=` in the join link.",
            field="client.ca",
        ) from problem
