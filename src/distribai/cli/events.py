"""``distribai job events`` and ``distribai nodes events``: state changes, as they are committed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.watching import Patience
from distribai.cli.why import JobRef, NodeRef

if TYPE_CHECKING:
    from distribai.api.answers import EventRecord

HELD_S = 10.0
"""Seconds that one question may be held until there is an answer."""

Ask = Callable[[str, float], "list[EventRecord]"]
"""Events behind a cursor, waiting so many seconds for the first."""

After = Annotated[
    str, Parameter(help="Only what lies behind this cursor, the `cursor` of an earlier event.")
]
Follow = Annotated[
    bool,
    Parameter(name="--watch", negative="", show_default=False, help="Go on with every new event."),
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


def job_events(
    ref: JobRef,
    /,
    *,
    after: After = "",
    watch: Follow = False,
    as_json: Json = False,
    reach: Reach | None = None,
) -> None:
    """Show a job's state changes, and those of its rounds and tasks, in the order of commit."""
    with connect(reach) as client:
        job_id = client.job(ref).id
        stream(lambda cursor, wait: client.events(job_id, cursor, wait), after, watch, as_json)


def node_events(
    ref: NodeRef,
    /,
    *,
    after: After = "",
    watch: Follow = False,
    as_json: Json = False,
    reach: Reach | None = None,
) -> None:
    """Show a node's state changes, and those of the tasks that it held, in the order of commit."""
    with connect(reach) as client:
        stream(lambda cursor, wait: client.node_events(ref, cursor, wait), after, watch, as_json)


def stream(ask: Ask, after: str, watch: bool, as_json: bool) -> None:
    """Print events behind ``after``; with ``watch`` until interrupted."""
    patience = Patience()
    cursor, gathered = after, list["EventRecord"]()
    while True:
        found = patience.call(partial(ask, cursor, HELD_S if watch else 0.0))
        for event in found:
            if not as_json:
                output.data(event_line(event))
            elif watch:
                output.json_line(event)
            else:
                gathered.append(event)
        sys.stdout.flush()
        cursor = found[-1].cursor if found else cursor
        if not found and not watch:
            break
    if as_json and not watch:
        output.document(gathered)
    elif cursor == after and not watch:
        output.note("Nothing has happened behind that cursor." if after else "No event yet.")


def event_line(event: EventRecord) -> str:
    """``12:00:01  task.leased  task_abc...  node_abc...  phase=train round=0``."""
    from distribai.cli.job_views import moment

    data = " ".join(
        f"{name}={value}" for name, value in event.data.items() if value not in ("", None)
    )
    parts = [moment(event.at), event.kind, event.task_id[:13], event.node_id[:13], data]
    return output.visible("  ".join(part for part in parts if part))
