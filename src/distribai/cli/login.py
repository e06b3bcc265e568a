"""``distribai login``: speak to a grid as oneself from now on."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import (
    Credentials,
    Reach,
    authority,
    read_credentials,
    resolve,
    write_credentials,
)
from distribai.errors import Conflict, UsageError

LOGIN = "dol_"
"""How one-time logins begin; whatever else is given is a key."""


def login(
    *,
    replace: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Forget the operator's key of this machine's own grid.",
        ),
    ] = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Log in to a grid: the other commands of this user speak to it from now on.

    --token takes a one-time login, which is exchanged for a key, or a key; without it one is read
    from stdin. The key is kept in a file that this user alone may read.
    """
    from distribai.client import Client

    settings = resolve(reach)
    given = _given(reach)
    before = read_credentials(settings.home)
    if before is not None and before.state_dir and not replace:
        raise Conflict(
            "auth.kept",
            f"The key that `orchestrator start` left for {before.url} would be lost.",
            "Add --replace if it is not needed here any more; or put the new key into "
            "DISTRIBAI_TOKEN and the address into DISTRIBAI_URL instead.",
        )
    url, ca = settings.client().url, authority(settings)
    token, found = given, None
    if given.startswith(LOGIN):
        with Client(url, ca=ca) as client:
            token = client.people.log_in(given, f"login on {_machine()}").secret
    else:
        with Client(url, token, ca=ca) as client:
            found = client.people.me()  # a key that opens nothing replaces none
    try:
        path = write_credentials(settings.home, Credentials(url, token, "", ca))
    except OSError as problem:
        # The login is used up: its key must not be lost.
        output.data(token)
        raise UsageError(
            "io.file",
            f"The key cannot be kept: {problem}.",
            "Put the key that stands on stdout into DISTRIBAI_TOKEN.",
        ) from problem
    if found is None:
        with Client(url, token, ca=ca) as client:
            found = client.people.me()
    if as_json:
        output.document({"url": url, "account": found, "credentials": str(path)})
    else:
        output.data(f"You are {found.name} at {url}. The key is kept in {path}.")


def _given(reach: Reach | None) -> str:
    """The login or key that was given, or is typed.

    Raises:
        UsageError: ``usage.invalid``: there is none.
    """
    given = (reach.token if reach is not None else None) or ""
    if not given and sys.stdin.isatty():
        import getpass

        given = getpass.getpass("Login or key: ")
    elif not given:
        given = sys.stdin.readline()
    given = given.strip()
    if not given:
        raise UsageError(
            "usage.invalid",
            "No login or key was given.",
            "An operator makes a one-time login: `distribai account login NAME`.",
        )
    return given


def _machine() -> str:
    import platform

    return platform.node()[:60] or "some machine"
