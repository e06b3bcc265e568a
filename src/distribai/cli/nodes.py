"""``distribai nodes``: the grid's machines, as the operator sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App

from distribai.cli import events, output, why
from distribai.cli.connection import Reach, connect
from distribai.cli.watching import repeat
from distribai.core.states import Liveness

if TYPE_CHECKING:
    from distribai.api.answers import DeviceRecord, NodeRecord
    from distribai.client import Client

app = App(name=("nodes", "fleet"), help="See the grid's machines; `fleet` is the same.")
app.command(why.node_why, name="why")
app.command(events.node_events, name="events")


@app.command(name="list")
def list_nodes(
    *, as_json: output.Json = False, watch: output.Watch = False, reach: Reach | None = None
) -> None:
    """List the nodes that ever joined, the live ones first."""
    with connect(reach) as client:
        if watch:
            repeat(lambda: _all(client), render, as_json)
            return
        found = _all(client)
    if as_json:
        output.document(found)
    elif found:
        output.data(render(found))
    else:
        output.note("No node has joined yet: `distribai node start --join LINK`.")


def _all(client: Client) -> list[NodeRecord]:
    """All nodes, the live ones first."""
    order = [state.value for state in Liveness]
    return sorted(client.nodes(), key=lambda node: order.index(node.liveness))


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
                output.plural(len(node.tasks), "task") if node.tasks else "idle",
                "; ".join(device_words(d) for d in node.devices),
                output.size(node.bytes_up),
                output.size(node.bytes_down),
            )
            for node in nodes
        ],
    )


def device_words(device: DeviceRecord) -> str:
    """``cpu, 2 threads``, as a processor's name is seldom more than ``x86_64``; else the name."""
    if device.type == "cpu" and device.threads:
        return f"cpu, {output.plural(device.threads, 'thread')}"
    return f"{device.type}, {device.name}" if device.name else device.type
