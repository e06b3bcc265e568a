"""``distribai account``: the people of a grid, and what their machines did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, authority, connect, login_line, resolve
from distribai.cli.job_views import moment

if TYPE_CHECKING:
    from distribai.api.people import Account, AccountSummary, Membership, NewLogin

app = App(name="account", help="The people of a grid, and what their machines did.")

Who = Annotated[str, Parameter(help="An account's name or id.")]


@app.command
def create(
    name: Annotated[str, Parameter(help="Lower-case letters, digits, dots and hyphens.")],
    /,
    *,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Make an account, and a one-time login to hand to its owner.

    It is in no organization yet: `distribai team add TEAM NAME`.
    """
    with connect(reach) as client:
        _login(client.people.create_account(name), reach, as_json)


@app.command
def login(who: Who, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Make a new one-time login for somebody who has lost all keys."""
    with connect(reach) as client:
        _login(client.people.new_login(who), reach, as_json)


@app.command(name="list")
def list_accounts(*, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """List all accounts (operators)."""
    with connect(reach) as client:
        found = client.people.accounts()
    if as_json:
        output.document(found)
    else:
        output.data(accounts_table(found))


@app.command
def show(
    who: Annotated[str, Parameter(help="An account's name or id.  [default: your own]")] = "",
    /,
    *,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Show an account: where it is what, its machines, and what they did."""
    with connect(reach) as client:
        found = client.people.account(who or client.people.me().id)
    if as_json:
        output.document(found)
        return
    output.data(output.facts(account_facts(found)))
    if found.nodes:
        output.data("\n" + nodes_table(found))


@app.command
def close(who: Who, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Close an account: its keys and invites let nobody in any more."""
    with connect(reach) as client:
        found = client.people.close_account(who)
    if as_json:
        output.document(found)
    else:
        output.data(f"{found.name} is closed. What it did stays on record.")


def _login(made: NewLogin, reach: Reach | None, as_json: bool) -> None:
    if as_json:
        output.document(made)
        return
    settings = resolve(reach)
    output.data(login_line(settings.client().url, made.login, authority(settings)))
    output.note(
        f"{made.account} ({made.account_id}) runs this once, until {moment(made.expires_at)}. "
        "It is shown only now."
    )


def accounts_table(accounts: list[AccountSummary]) -> str:
    """A line for each account."""
    return output.table(
        ("NAME", "ID", "ROLES", "CREATED", "CLOSED"),
        [
            (a.name, a.id, roles_words(a.memberships), moment(a.created_at), moment(a.closed_at))
            for a in accounts
        ],
    )


def roles_words(memberships: list[Membership]) -> str:
    """``member of lab, viewer of home``."""
    return ", ".join(f"{m.role} of {m.organization}" for m in memberships) or "none"


def account_facts(account: Account) -> list[tuple[str, str]]:
    """What an account is, and what its machines did in all."""
    return [
        ("account", f"{account.name} ({account.id})"),
        ("roles", roles_words(account.memberships)),
        ("since", moment(account.created_at)),
        *([("closed", moment(account.closed_at))] if account.closed_at is not None else []),
        ("machines", str(len(account.nodes))),
        ("work", f"{output.plural(account.tasks, 'task')}, {output.count(account.tokens)} tokens"),
        (
            "bytes",
            f"{output.size(account.bytes_up)} up, {output.size(account.bytes_down)} down",
        ),
    ]


def nodes_table(account: Account) -> str:
    """A line for each machine."""
    return output.table(
        ("NODE", "NAME", "LIVENESS", "STANDING", "TASKS", "TOKENS", "UP", "DOWN"),
        [
            (
                n.id[:13],
                n.name,
                n.liveness,
                n.standing,
                str(n.tasks),
                output.count(n.tokens),
                output.size(n.bytes_up),
                output.size(n.bytes_down),
            )
            for n in account.nodes
        ],
    )
