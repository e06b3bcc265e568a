"""``distribai nodes``: the grid's machines; to others than operators their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from distribai.cli import events, output, why
from distribai.cli.connection import Reach, connect
from distribai.cli.watching import repeat
from distribai.core.states import Intent, Liveness

if TYPE_CHECKING:
    from distribai.api.answers import DeviceRecord, NodeRecord, NodeState
    from distribai.client import Client

app = App(name=("nodes", "fleet"), help="See the grid's machines; `fleet` is the same.")
app.command(why.node_why, name="why")
app.command(events.node_events, name="events")


Why = Annotated[str, Parameter(help="The reason, for the record and for the node's owner.")]


@app.command(name="list")
def list_nodes(
    *, as_json: output.Json = False, watch: output.Watch = False, reach: Reach | None = None
) -> None:
    """List the nodes that ever joined, the live ones first; operators see all, others their own."""
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
            output.note(_nobody(client))


def _nobody(client: Client) -> str:
    """What to do where there is no node, to whoever asks."""
    if client.people.me().operator:
        return "No node has joined yet: `distribai node start --join LINK`."
    return (
        "None of your machines has joined; other people's are not shown. For a machine of yours "
        "ask an operator for an invite, and start it with the join link: `distribai node start "
        "--join LINK`."
    )


def _all(client: Client) -> list[NodeRecord]:
    """All nodes, the live ones first."""
    order = [state.value for state in Liveness]
    return sorted(client.nodes(), key=lambda node: order.index(node.liveness))


@app.command
def pause(ref: why.NodeRef, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Let a node rest.

    It stands still before its next step and gets nothing new until it is resumed.
    """
    with connect(reach) as client:
        _ordered(client.order_node(ref, "pause"), as_json)


@app.command
def resume(
    ref: why.NodeRef, /, *, as_json: output.Json = False, reach: Reach | None = None
) -> None:
    """Let a paused node work again.

    If its owner has paused it too, it goes on pausing.
    """
    with connect(reach) as client:
        _ordered(client.order_node(ref, "resume"), as_json)


@app.command
def drain(ref: why.NodeRef, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Let a node finish what it has, and leave."""
    with connect(reach) as client:
        _ordered(client.order_node(ref, "drain"), as_json)


@app.command
def quarantine(
    ref: why.NodeRef,
    /,
    *,
    why: Why,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Set a node apart.

    It loses its tasks and gets none until it is pardoned.
    """
    with connect(reach) as client:
        _told(client.stand_node(ref, "quarantine", why), as_json)


@app.command
def trust(
    ref: why.NodeRef,
    /,
    *,
    why: Why,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Trust a node.

    It gets work of jobs that ask for trusted nodes, too.
    """
    with connect(reach) as client:
        _told(client.stand_node(ref, "trust", why), as_json)


@app.command
def ban(
    ref: why.NodeRef,
    /,
    *,
    why: Why,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Shut a node's key out."""
    with connect(reach) as client:
        _told(client.stand_node(ref, "ban", why), as_json)


@app.command
def pardon(
    ref: why.NodeRef,
    /,
    *,
    why: Why,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """End a node's quarantine or ban.

    It is on probation then, and what it failed before is forgotten.
    """
    with connect(reach) as client:
        _told(client.stand_node(ref, "pardon", why), as_json)


def _told(node: NodeState, as_json: bool) -> None:
    """Say what a node's standing is now."""
    if as_json:
        output.document(node)
        return
    orders = {"pause": ", paused by the operator", "drain": ", told to drain"}
    words = f"{node.id[:13]} is {node.standing}{orders.get(node.ordered, '')}"
    output.data(f"{words} now; it is {node.liveness} and wants to {node.intent}.")


_ORDERS = {
    Intent.CONTRIBUTE: "may work again",
    Intent.PAUSE: "is paused by the operator",
    Intent.DRAIN: "is to finish what it has and leave",
}


def _ordered(node: NodeState, as_json: bool) -> None:
    """Say what a node was told. What it wants itself was heard before, and says nothing yet."""
    if as_json:
        output.document(node)
        return
    words = f"{node.id[:13]} {_ORDERS[Intent(node.ordered)]}; it is {node.liveness}"
    if node.liveness == Liveness.OFFLINE:
        words += " and hears of it when it is back"
    elif node.intent != node.ordered:
        words += " and hears of it in a moment"
    output.data(f"{words}.")
    if node.ordered == Intent.CONTRIBUTE and node.intent == Intent.PAUSE:
        output.note("If its owner has paused it too, it goes on pausing.")


def work_words(node: NodeRecord) -> str:
    """What a node is at, or why it is at nothing."""
    tasks = output.plural(len(node.tasks), "task") if node.tasks else ""
    wants = {node.intent, node.ordered}
    if node.liveness == Liveness.OFFLINE:
        return tasks or "-"
    if Intent.DRAIN in wants:
        return f"{tasks}, leaving" if tasks else "leaving"
    if Intent.PAUSE in wants:
        why = f": {node.intent_reason}" if node.intent_reason else ""
        return f"{tasks}, paused{why}" if tasks else f"paused{why}"
    return tasks or "idle"


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
                work_words(node),
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
