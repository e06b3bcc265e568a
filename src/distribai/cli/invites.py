"""``distribai grid invite``: join links for an account's machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.job_views import moment
from distribai.cli.words import seconds

if TYPE_CHECKING:
    from distribai.api.people import Invite

app = App(name="invite", help="Join links for the machines of an account (operators).")


@app.command
def create(
    account: Annotated[str, Parameter(help="Whose machines they will be: a name or an id.")],
    /,
    *,
    trusted: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Trust them from the beginning; else they are on probation.",
        ),
    ] = False,
    uses: Annotated[
        int | None, Parameter(help="Machines it lets in.  [default: any number]")
    ] = None,
    expires: Annotated[str, Parameter(help="For so long: 30d, 12h.  [default: for ever]")] = "",
    note: Annotated[str, Parameter(help="What it is for.")] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Make an invite, and print its join link, once."""
    with connect(reach) as client:
        made = client.people.create_invite(
            account, trusted=trusted, uses=uses, expires_s=seconds(expires), note=note
        )
    if as_json:
        output.document(made)
        return
    output.data(f'distribai node start --join "{made.join_link}"')
    output.note(f"{made.invite.id}: machines of {made.invite.account}. It is shown only now.")


@app.command(name="list")
def list_invites(*, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """List all invites, also those that are over."""
    with connect(reach) as client:
        found = client.people.invites()
    if as_json:
        output.document(found)
    else:
        output.data(invites_table(found))


@app.command
def revoke(
    invite_id: Annotated[str, Parameter(help="The invite's id.")],
    /,
    *,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Revoke an invite; machines that came by it stay."""
    with connect(reach) as client:
        found = client.people.revoke_invite(invite_id)
    if as_json:
        output.document(found)
    else:
        output.data(f"{found.id} lets nobody in any more.")


def invites_table(invites: list[Invite]) -> str:
    """A line for each invite."""
    return output.table(
        ("ID", "ACCOUNT", "NODES", "STATE", "LEFT", "EXPIRES", "NOTE"),
        [
            (
                i.id,
                i.account,
                {None: "as the grid", True: "trusted", False: "probation"}[i.trusted],
                "valid" if i.valid else "over",
                "any" if i.uses_left is None else str(i.uses_left),
                moment(i.expires_at),
                i.note,
            )
            for i in invites
        ],
    )
