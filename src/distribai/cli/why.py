"""``distribai job why`` and ``distribai nodes why``: what people see of reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.watching import repeat
from distribai.core.tasks import works_on

if TYPE_CHECKING:
    from distribai.api.why import Held, JobWhy, NodeWhy, Reason

W = TypeVar("W", "JobWhy", "NodeWhy")

JobRef = Annotated[str, Parameter(help="A job's id, a unique beginning of it, or its name.")]
NodeRef = Annotated[str, Parameter(help="A node's id, a unique beginning of it, or its name.")]


def job_why(
    ref: JobRef,
    /,
    *,
    watch: output.Watch = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Say why a job is where it is, and what it waits for.

    Asked of the scheduler at this moment: the operator's word, too few or too small devices, a
    round that waits for others and until when, each queued task with its reason.
    """
    with connect(reach) as client:
        _tell(lambda: client.why(ref), job_words, watch, as_json)


def node_why(
    ref: NodeRef,
    /,
    *,
    watch: output.Watch = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Say what a node holds, and why it gets no more.

    For each open job: why nothing of it comes to this node.
    """
    with connect(reach) as client:
        _tell(lambda: client.node_why(ref), node_words, watch, as_json)


def _tell(ask: Callable[[], W], words: Callable[[W], str], watch: bool, as_json: bool) -> None:
    """Print what is found, once or again and again."""
    if watch:
        repeat(ask, words, as_json)
    elif as_json:
        output.document(ask())
    else:
        output.data(words(ask()))


def job_words(why: JobWhy) -> str:
    """The job in a line, then a line for each reason."""
    head = f"{why.name} ({why.id[:12]}) is {why.state}."
    return "\n".join([output.visible(head), *_lines(why.reasons, why.now)])


def node_words(why: NodeWhy) -> str:
    """The node in a line, then its devices, then why it gets no more."""
    silent = output.duration(why.now - why.last_heard_at)
    head = (
        f"{why.name or 'A node'} ({why.id[:13]}) is {why.liveness}, {why.standing}, wants to "
        f"{why.intent}; last heard {silent} ago."
    )
    devices = [
        output.visible(f"  device {d.device} ({_size(d)}): {_holds(d, why.now)}")
        for d in why.devices
    ]
    reasons = _lines(why.reasons, why.now)
    if not reasons:
        reasons = ["  It has no free device."] if why.devices else []
    return "\n".join([output.visible(head), *devices, *reasons])


def _size(device: Held) -> str:
    return f"{device.type}, {device.memory_mb} MB" if device.memory_mb else device.type


def _holds(device: Held, now: float) -> str:
    if not device.task_id:
        return "free"
    since = output.duration(None if device.since is None else now - device.since)
    return (
        f"{device.phase} task {device.task_id[:13]} of {device.job_id[:12]}, "
        f"{works_on(device.phase, device.round)}, for {since}"
    )


def _lines(reasons: Sequence[Reason], now: float) -> list[str]:
    lines = []
    for reason in reasons:
        text = reason.text
        if reason.until is not None:
            text += f" At most {output.duration(reason.until - now)} more."
        if reason.nodes:
            text += f" ({', '.join(node[:13] for node in reason.nodes)})"
        lines.append(f"  {output.visible(text)}")
        if reason.hint:
            lines.append(f"      try: {output.visible(reason.hint)}")
    return lines
