"""How a command finds the orchestrator: flags, DISTRIBAI_URL and DISTRIBAI_TOKEN, files, and last
the credentials that ``orchestrator start`` left for the same user on the same machine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from distribai import durable

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
        Parameter(help="The operator's token; better in DISTRIBAI_TOKEN, out of sight."),
    ] = None


@dataclass(frozen=True)
class Credentials:
    """What ``orchestrator start`` left. ``state_dir`` says whose token it is: a grid keeps its
    token over restarts, and another grid has another."""

    url: str
    token: str
    state_dir: str


def read_credentials(home: Home) -> Credentials | None:
    """The credentials file of this home; None when there is none that can be used."""
    try:
        found = json.loads(home.credentials.read_text(encoding="utf-8"))
        return Credentials(str(found["url"]), str(found["token"]), str(found["state_dir"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_credentials(home: Home, credentials: Credentials) -> Path:
    """Leave them for this user's other commands, readable by nobody else.

    Raises:
        OSError: the file cannot be written.
    """
    path = home.credentials
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(vars(credentials), file)
    durable.promote(beside, path, point="start.credentials")
    return path


def resolve(reach: Reach | None = None) -> Settings:
    """All settings, with the credentials file between the files and the defaults.

    A token found in the credentials file goes to the address found there and to no other.

    Raises:
        UsageError: ``config.invalid``.
    """
    from distribai import config

    flags = {} if reach is None else {"client.url": reach.url, "client.token": reach.token}
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
    return settings


def connect(reach: Reach | None) -> Client:
    """A client of the grid that the user means."""
    from distribai.client import Client

    settings = resolve(reach).client()
    return Client(settings.url, settings.token)
