"""``distribai nodes``: the grid's machines, as the operator sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.watching import repeat

if TYPE_CHECKING:
    from distribai.api.answers import NodeRecord

app = App(name="nodes", help="See the grid's machines.")


@app.command(name="list")
def list_nodes(
    *, as_json: output.Json = False, watch: output.Watch = False, reach: Reach | None = None
) -> None:
    """List the nodes that ever joined, the live ones first."""
    with connect(reach) as client:
        if watch:
            repeat(client.nodes, render, as_json)
            return
        found = client.nodes()
    if as_json:
        output.document(found)
    elif found:
        output.data(render(found))
    else:
        output.note("No node has joined yet: `distribai node start --join LINK`.")


def render(nodes: list[NodeRecord]) -> str:
    """The table."""
    return output.table(
        ("ID", "NAME", "LIVENESS", "STANDING", "WORK", "DEVICES", "UP", "DOWN"),
        [
            (
                node.id[:13],
                node.name,
                node.liveness,
                node.standing,
                f"{len(node.tasks)} tasks" if node.tasks else "idle",
                ", ".join(d.name or d.type for d in node.devices),
                output.size(node.bytes_up),
                output.size(node.bytes_down),
            )
            for node in nodes
        ],
    )
