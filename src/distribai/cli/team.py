"""``distribai team``: organizations, who is in them, and as what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect

if TYPE_CHECKING:
    from distribai.api.people import Organization

app = App(name="team", help="Organizations: who is in them, and as what.")

Team = Annotated[str, Parameter(help="An organization's name or id.")]
Who = Annotated[str, Parameter(help="An account's name or id.")]
RoleName = Annotated[
    str, Parameter(help="member, viewer, contributor; in `home` alone also operator.")
]


@app.command
def create(
    name: Annotated[str, Parameter(help="Lower-case letters, digits, dots and hyphens.")],
    /,
    *,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Make an organization.

    Its jobs wait for the operator's word until `distribai grid policy` says otherwise.
    """
    with connect(reach) as client:
        _told(client.people.create_organization(name), "made", as_json)


@app.command(name="list")
def list_teams(*, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """List your organizations; operators see all."""
    with connect(reach) as client:
        found = client.people.organizations()
    if as_json:
        output.document(found)
    elif found:
        output.data(teams_table(found))
    else:
        output.note("You are in no organization yet; an operator adds you.")


@app.command
def show(team: Team, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Show an organization: its members, its policy, its quotas."""
    with connect(reach) as client:
        found = client.people.organization(team)
    if as_json:
        output.document(found)
        return
    output.data(output.facts(team_facts(found)))
    if found.members:
        rows = [(m.account, m.role, m.account_id) for m in found.members]
        output.data("\n" + output.table(("ACCOUNT", "ROLE", "ID"), rows))


@app.command
def add(
    team: Team,
    who: Who,
    /,
    *,
    role: RoleName = "member",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Take an account into an organization."""
    with connect(reach) as client:
        _told(client.people.set_role(team, who, role), f"has {who} as {role}", as_json)


@app.command(name="role")
def set_role(
    team: Team,
    who: Who,
    role: RoleName,
    /,
    *,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Give an account another role in an organization."""
    with connect(reach) as client:
        _told(client.people.set_role(team, who, role), f"has {who} as {role}", as_json)


@app.command
def remove(
    team: Team, who: Who, /, *, as_json: output.Json = False, reach: Reach | None = None
) -> None:
    """Take an account out of an organization; its jobs stay there."""
    with connect(reach) as client:
        _told(client.people.remove_member(team, who), f"is without {who}", as_json)


def _told(team: Organization, what: str, as_json: bool) -> None:
    if as_json:
        output.document(team)
    else:
        output.data(output.visible(f"{team.name} {what} now ({team.id})."))


def teams_table(teams: list[Organization]) -> str:
    """A line for each organization."""
    return output.table(
        ("NAME", "ID", "MEMBERS", "POLICY", "OPEN JOBS", "STORED"),
        [
            (
                t.name,
                t.id,
                str(len(t.members)),
                policy_words(t),
                str(t.usage.open_jobs),
                output.size(t.usage.bytes),
            )
            for t in teams
        ],
    )


def team_facts(team: Organization) -> list[tuple[str, str]]:
    """An organization's rules, and what it has of what they limit."""
    quota = team.quota
    return [
        ("organization", f"{team.name} ({team.id})"),
        ("policy", policy_words(team)),
        ("open jobs", f"{team.usage.open_jobs} of {_limit(quota.open_jobs)}"),
        ("stored", f"{output.size(team.usage.bytes)} of {_limit(quota.bytes, output.size)}"),
        ("steps in a job", f"at most {_limit(quota.steps)}"),
        ("tokens in a job", f"at most {_limit(quota.tokens)}"),
    ]


def _limit(figure: int | None, shown: Callable[[int], str] = str) -> str:
    return "any number" if figure is None else shown(figure)


def policy_words(team: Organization) -> str:
    """``ask``, ``always``, ``at most 1M tokens``, ``22:00-06:00 UTC``."""
    policy = team.policy
    if policy.accept == "hours":
        return f"{policy.hours} UTC"
    if policy.accept == "size":
        limits = [(policy.max_parameters, "parameters"), (policy.max_tokens, "tokens")]
        told = [f"{output.count(limit)} {what}" for limit, what in limits if limit is not None]
        return "at most " + ", ".join(told)
    return policy.accept
