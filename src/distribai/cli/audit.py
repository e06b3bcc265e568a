"""``distribai grid audit``: who did what, when, and by which key."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.events import Follow, Json, event_line
from distribai.cli.watching import Patience

if TYPE_CHECKING:
    from distribai.api.people import AuditRecord

HELD_S = 10.0
"""Seconds that one question may be held until there is an answer."""

After = Annotated[
    str, Parameter(help="Only what lies behind this cursor, the `cursor` of an earlier event.")
]


def audit(
    *,
    account: Annotated[str, Parameter(help="Only what this account did.")] = "",
    after: After = "",
    watch: Follow = False,
    as_json: Json = False,
    reach: Reach | None = None,
) -> None:
    """Show what people did, in the order in which it was committed (operators)."""
    patience = Patience()
    cursor, gathered = after, list["AuditRecord"]()
    with connect(reach) as client:
        while True:
            wait = HELD_S if watch else 0.0
            found = patience.call(partial(client.people.audit, cursor, wait, account))
            for record in found:
                if not as_json:
                    output.data(audit_line(record))
                elif watch:
                    output.json_line(record)
                else:
                    gathered.append(record)
            sys.stdout.flush()
            cursor = found[-1].event.cursor if found else cursor
            if not found and not watch:
                break
    if as_json and not watch:
        output.document(gathered)
    elif cursor == after and not watch:
        output.note("Nobody has done anything yet.")


def audit_line(record: AuditRecord) -> str:
    """``ann by laptop (dak_x1y2z3...)  <the event's line>``."""
    key = f" by {record.key}" if record.key else ""
    job = f"  {record.event.job_id}" if record.event.job_id else ""
    who = record.account or record.event.account_id
    return output.visible(f"{event_line(record.event)}{job}  {who}{key}")
