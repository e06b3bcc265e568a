"""``distribai orchestrator``: run the grid's control plane."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from distribai.cli import output

if TYPE_CHECKING:
    from distribai.config import Settings
    from distribai.orchestrator.main import Orchestrator

app = App(name="orchestrator", help="Run the grid's control plane.")


@app.command
def start(
    *,
    host: Annotated[
        str | None, Parameter(help="Address to listen on.  [default: 127.0.0.1]")
    ] = None,
    grpc_port: Annotated[
        int | None, Parameter(help="Port of the nodes' stream, 0: any.  [default: 50051]")
    ] = None,
    http_port: Annotated[
        int | None, Parameter(help="Port of the HTTP interface, 0: any.  [default: 8766]")
    ] = None,
    db: Annotated[
        str | None, Parameter(help="SQLAlchemy URL.  [default: SQLite in the state directory]")
    ] = None,
    blobs: Annotated[
        str | None,
        Parameter(help="Directory or s3://bucket/prefix.  [default: in the state directory]"),
    ] = None,
    state_dir: Annotated[
        Path | None, Parameter(help="Where everything that lasts is kept.")
    ] = None,
    tls: Annotated[
        bool | None,
        Parameter(negative="", show_default=False, help="TLS on loopback as well."),
    ] = None,
    insecure: Annotated[
        bool | None,
        Parameter(
            negative="",
            show_default=False,
            help="No TLS beyond loopback: a proxy has it, or the network is trusted.",
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        Parameter(help="Directory of the grid's CA.  [default: the state directory]"),
    ] = None,
    new_ca: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Begin with a new CA, because the old one is lost or stolen.",
        ),
    ] = False,
    client_certificates: Annotated[
        Literal["required", "off"] | None,
        Parameter(
            help="Whether nodes must show a certificate of the grid's CA on their stream.  "
            "[default: off]"
        ),
    ] = None,
    mode: Annotated[
        Literal["trusted", "open"] | None,
        Parameter(help="Whose nodes may join: your own, or anybody's.  [default: as it was]"),
    ] = None,
    as_json: output.Json = False,
) -> int:
    """Run an orchestrator until it is interrupted.

    Prints the join link for nodes. At the grid's first start it leaves the operator's first key,
    readable by this user alone, where the other commands find it, and prints a one-time login for
    another machine; with --json also the key.
    """
    from distribai import config
    from distribai.cli.logs import configure, wants_debug

    settings = config.load(
        {
            "orchestrator.host": host,
            "orchestrator.grpc_port": grpc_port,
            "orchestrator.http_port": http_port,
            "orchestrator.db": db,
            "orchestrator.blobs": blobs,
            "orchestrator.state_dir": state_dir,
            "orchestrator.tls": tls,
            "orchestrator.insecure": insecure,
            "orchestrator.keys": None if keys is None else str(keys),
            "orchestrator.client_certificates": client_certificates,
            "orchestrator.mode": mode,
        }
    )
    configure(wants_debug(), settings.logs().format)
    from distribai.orchestrator.main import run_orchestrator

    return run_orchestrator(
        settings.orchestrator(), lambda running: _ready(running, settings, as_json), new_ca=new_ca
    )


def _ready(running: Orchestrator, settings: Settings, as_json: bool) -> None:
    from distribai.cli.connection import login_line
    from distribai.tls import fingerprint

    url = running.url
    state_dir = str(settings.orchestrator().state_dir)
    if running.join_note:
        output.note(running.join_note)
    saved = save_credentials(settings, url, running.operator_token, state_dir, running.ca_pem)
    if as_json:
        output.json_line(
            {
                "url": url,
                "grpc": running.grpc_address,
                "http": running.http_address,
                "join_link": running.join_link,
                "replica": running.grid.holder,
                "ca": running.ca_pem,
                "operator_token": running.operator_token,
                "operator_login": running.operator_login,
                "credentials": saved,
            }
        )
        return
    output.data(f"Nodes:  gRPC on {running.grpc_address}")
    output.data(f"People: HTTP on {url}")
    if running.ca_pem:
        output.data(f"CA:     SHA-256 {fingerprint(running.ca_pem)} (in the join link)")
    output.data("\nOn every machine that shall contribute:\n")
    # Quoted: shells would take its & for themselves. Double quotes do in all of them.
    output.data(f'    distribai node start --join "{running.join_link}"\n')
    if running.operator_token:
        output.data("To operate it from another machine, once and within seven days:\n")
        line = login_line(running.public_url, running.operator_login, running.ca_pem)
        output.data(f"    {line}\n")
    if saved:
        output.data(f"Other commands of this user on this machine find it in {saved}.")
    output.data("Ctrl-C stops the orchestrator; started again it goes on where it was.")
    sys.stdout.flush()


def save_credentials(
    settings: Settings, url: str, token: str, state_dir: str, ca_pem: str = ""
) -> str:
    """Leave address, token and CA for the other commands; where, or "" when that is not possible.

    At a later start of the same grid the token is not known any more: the one left before is taken.
    The commands speak to the grid that was started last; that they spoke to another one is said. A
    login to a grid elsewhere stays: it could not be had back.
    """
    from distribai.cli.connection import (
        Credentials,
        keep_credentials,
        read_credentials,
        read_kept,
        write_credentials,
    )

    before = read_credentials(settings.home)
    if not token:
        known = read_kept(settings.home, state_dir)
        if known is None and before is not None and before.state_dir == state_dir:
            known = before  # left by an earlier release
        if known is None:
            return ""
        token = known.token
    try:
        mine = Credentials(url, token, state_dir, ca_pem)
        if before is not None and not before.state_dir:
            keep_credentials(settings.home, mine)
            output.note(
                f"The commands of this user are logged in to {before.url} and stay so. Remove "
                f"{settings.home.credentials} and start again to have them speak to this grid."
            )
            return ""
        path = write_credentials(settings.home, mine)
    except OSError as problem:
        output.note(f"The credentials could not be saved: {problem}")
        return ""
    if before is not None and before.state_dir != state_dir:
        output.note(
            f"The commands of this user spoke to {before.url} until now, and speak to this grid "
            "from now on. Starting that one again turns them back."
        )
    return str(path)
