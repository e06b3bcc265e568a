"""``distribai events``, ``job events``, ``nodes events``: state changes, as they are committed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.why import JobRef, NodeRef

if TYPE_CHECKING:
    from distribai.api.answers import EventRecord
    from distribai.client import Client
    from distribai.errors import DistribAIError

After = Annotated[
    str,
    Parameter(
        help="Only what lies behind this cursor, the `cursor` of an earlier event; `latest`: only "
        "what comes from now on."
    ),
]
Follow = Annotated[
    bool,
    Parameter(
        name=("--watch", "--follow"),
        negative="",
        show_default=False,
        help="Go on with every new event.",
    ),
]
Kind = Annotated[
    list[str] | None,
    Parameter(
        negative="", help="Only this kind (`job.completed`) or family (`task.*`); repeat it."
    ),
]
Json = Annotated[
    bool,
    Parameter(
        name="--json",
        negative="",
        show_default=False,
        help="Print JSON: a list, or with --watch one document a line.",
    ),
]


def grid_events(
    *,
    kind: Kind = None,
    after: After = "",
    watch: Follow = False,
    as_json: Json = False,
    reach: Reach | None = None,
) -> None:
    """Show everything that changed in the grid, in the order of commit."""
    with connect(reach) as client:
        show(client, "", "", kind, after, watch, as_json)


def job_events(
    ref: JobRef,
    /,
    *,
    kind: Kind = None,
    after: After = "",
    watch: Follow = False,
    as_json: Json = False,
    reach: Reach | None = None,
) -> None:
    """Show a job's state changes, and those of its rounds and tasks, in the order of commit."""
    with connect(reach) as client:
        show(client, client.job(ref).id, "", kind, after, watch, as_json)


def node_events(
    ref: NodeRef,
    /,
    *,
    kind: Kind = None,
    after: After = "",
    watch: Follow = False,
    as_json: Json = False,
    reach: Reach | None = None,
) -> None:
    """Show a node's state changes, and those of the tasks that it held, in the order of commit."""
    with connect(reach) as client:
        show(client, "", ref, kind, after, watch, as_json)


def show(
    client: Client,
    job: str,
    node: str,
    kinds: list[str] | None,
    after: str,
    watch: bool,
    as_json: bool,
) -> None:
    """Print events behind ``after``; with ``watch`` until interrupted."""
    if watch:
        for event in client.follow(
            job=job, node=node, kinds=kinds or (), after=after, on_trouble=_told
        ):
            if as_json:
                output.json_line(event)
            else:
                output.data(event_line(event))
            sys.stdout.flush()
        return
    from distribai.client import calls

    cursor, gathered = after, list["EventRecord"]()
    while found := client.send(calls.events(cursor, job=job, node=node, kinds=kinds or ())).items:
        cursor = found[-1].cursor
        if as_json:
            gathered += found
        else:
            output.data("\n".join(map(event_line, found)))
    if as_json:
        output.document(gathered)
    elif cursor == after:
        output.note("Nothing has happened behind that cursor." if after else "No event yet.")


def _told(problem: DistribAIError | None) -> None:
    if problem is None:
        output.note("The orchestrator is back.")
    else:
        output.note(f"{problem.message} Trying again ...")


def event_line(event: EventRecord) -> str:
    """``12:00:01  task.leased  task_abc...  node_abc...  phase=train round=1``."""
    from distribai.cli.job_views import moment

    told = _for_people(event.data)
    data = " ".join(f"{name}={value}" for name, value in told.items() if value not in ("", None))
    parts = [moment(event.at), event.kind, event.task_id[:13], event.node_id[:13], data]
    return output.visible("  ".join(part for part in parts if part))


def _for_people(data: Mapping[str, Any]) -> dict[str, Any]:
    """An event's data with rounds counted from 1; what is done to a version names that."""
    told: dict[str, Any] = {}
    for name, value in data.items():
        if name == "round" and data.get("phase", "train") != "train":
            told["version"] = value
        elif name in ("round", "take", "merged_in") and isinstance(value, int):
            told[name] = value + 1
        else:
            told[name] = value
    return told
