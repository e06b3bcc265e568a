"""``distribai grid policy`` and ``distribai grid quota``: what an organization may."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.team import Team, policy_words, team_facts


def policy(
    team: Team,
    accept: Annotated[
        str, Parameter(help="ask, always, size or hours.  [default: show what holds]")
    ] = "",
    /,
    *,
    max_tokens: Annotated[
        int | None, Parameter(help="With size: target tokens of a job with all its workers.")
    ] = None,
    max_parameters: Annotated[
        int | None, Parameter(help="With size: parameters of the model.")
    ] = None,
    hours: Annotated[
        str, Parameter(help="With hours: time of day in UTC, 22:00-06:00.  [default: none]")
    ] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Show or set when an organization's jobs are accepted without asking the operator."""
    with connect(reach) as client:
        if accept or hours or max_tokens is not None or max_parameters is not None:
            found = client.people.set_policy(
                team,
                accept or "ask",
                max_tokens=max_tokens,
                max_parameters=max_parameters,
                hours=hours,
            )
        else:
            found = client.people.organization(team)
    if as_json:
        output.document(found.policy)
    else:
        output.data(f"{found.name}: {policy_words(found)}")


def quota(
    team: Team,
    /,
    *,
    open_jobs: Annotated[int | None, Parameter(help="Jobs that have not ended.")] = None,
    steps: Annotated[int | None, Parameter(help="Inner steps of one job.")] = None,
    tokens: Annotated[int | None, Parameter(help="Target tokens of one job.")] = None,
    bytes: Annotated[int | None, Parameter(help="Bytes uploaded and stored in all.")] = None,
    clear: Annotated[
        bool, Parameter(negative="", show_default=False, help="Lift all limits not given.")
    ] = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Show or set what an organization may have; limits that are not given stay."""
    given = {"open_jobs": open_jobs, "steps": steps, "tokens": tokens, "bytes": bytes}
    given = {name: figure for name, figure in given.items() if figure is not None}
    with connect(reach) as client:
        found = client.people.organization(team)
        if given or clear:
            before = {} if clear else found.quota.model_dump()
            found = client.people.set_quota(team, **{**before, **given})
    if as_json:
        output.document({"quota": found.quota, "usage": found.usage})
    else:
        output.data(output.facts(team_facts(found)))
