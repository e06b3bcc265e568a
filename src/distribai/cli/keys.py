"""``distribai grid key``: keys of one's own account."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.job_views import moment
from distribai.cli.words import seconds

if TYPE_CHECKING:
    from distribai.api.people import Key

app = App(name="key", help="Keys of your account, for programs and other machines.")


@app.command
def create(
    name: Annotated[str, Parameter(help="What it is for.")],
    /,
    *,
    scope: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            help="read, submit, keys, operate, metrics; give it again for more.  "
            "[default: those of the key in use]",
        ),
    ] = None,
    expires: Annotated[
        str, Parameter(help="Valid for so long: 30d, 12h.  [default: as the key in use]")
    ] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Make a key, which may do no more and lasts no longer than the one in use.

    It is printed once and cannot be shown again.
    """
    with connect(reach) as client:
        made = client.people.create_key(name, scope or [], seconds(expires))
    if as_json:
        output.document(made)
        return
    output.data(made.secret)
    until = f", until {moment(made.key.expires_at)}" if made.key.expires_at else ""
    output.note(f"{made.key.id}: {', '.join(made.key.scopes)}{until}. It is shown only now.")


@app.command(name="list")
def list_keys(
    *,
    account: Annotated[str, Parameter(help="Of another account (operators).")] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """List your keys, also those that are over."""
    with connect(reach) as client:
        found = client.people.keys(account)
    if as_json:
        output.document(found)
    else:
        output.data(keys_table(found))


@app.command
def revoke(
    key_id: Annotated[str, Parameter(help="The key's id.")],
    /,
    *,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Revoke a key: it opens nothing from now on."""
    with connect(reach) as client:
        found = client.people.revoke_key(key_id)
    if as_json:
        output.document(found)
    else:
        output.data(output.visible(f"{found.id} ({found.name}) is revoked."))


def keys_table(keys: list[Key]) -> str:
    """A line for each key."""
    return output.table(
        ("ID", "BEGINS", "NAME", "SCOPES", "STATE", "LAST USED", "EXPIRES"),
        [
            (
                k.id,
                k.prefix,
                k.name,
                " ".join(k.scopes),
                "valid" if k.valid else "revoked" if k.revoked_at else "expired",
                moment(k.last_used_at),
                moment(k.expires_at),
            )
            for k in keys
        ],
    )
