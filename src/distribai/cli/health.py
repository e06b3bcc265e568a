"""``distribai health``."""

from __future__ import annotations

from distribai.cli import output
from distribai.cli.connection import Reach, connect


def health(*, as_json: output.Json = False, reach: Reach | None = None) -> int:
    """Show how the grid is.

    Exit status 0 when nothing is wrong, 1 when something is, 8 when nobody answers.
    """
    with connect(reach) as client:
        found = client.health()
    if as_json:
        output.document(found)
        return 0 if found.ok else 1
    jobs = ", ".join(f"{n} {state}" for state, n in sorted(found.jobs.items()) if n) or "none"
    output.data(
        output.facts(
            [
                ("grid", f"{found.grid_id} at {client.url}, {found.mode}"),
                ("state", "fine" if found.ok else "problems"),
                (
                    "nodes",
                    f"{found.nodes_online} online ({found.nodes_working} working), "
                    f"{found.nodes_degraded} degraded, {found.nodes_offline} offline",
                ),
                ("jobs", jobs),
                ("tasks", f"{found.tasks_leased} at work, {found.tasks_queued} queued"),
                ("software", f"{found.software}, {found.database}"),
                *([("replicas", ", ".join(found.replicas))] if found.replicas else []),
            ]
        )
    )
    for problem in found.problems:
        output.note(f"problem: {problem}")
    return 0 if found.ok else 1
