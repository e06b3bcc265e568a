"""Why nothing starts: the scheduler's own answers, put into words for people and programs.

Nothing here decides anything. Whether a task fits a device is asked of :func:`match`, with that
task and that device alone; who may be given work at all is :func:`obstacles`, which a test holds
against the statement that the scheduler reads its nodes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distribai.core.scheduling import NO_TAGS, FreeDevice, Match, QueuedTask, match
from distribai.core.states import Intent, Liveness, Standing
from distribai.core.turns import Tags

MAX_LISTED = 20
"""Things of one kind that an answer lists; how many more there are is said."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is waited for, or that stands in the way.

    Attributes:
        code: what it is, one of :data:`CODES`; for programs, and it keeps its meaning.
        text: a sentence.
        hint: what somebody can do about it; empty when waiting is all there is to do.
        until: when it passes by itself at the latest, in database time; None when that is not
            known.
        job_id: the job that it is about, if it is about one.
        task_id: the task that it is about, if it is about one.
        nodes: the nodes that are waited for, or that it is about.
    """

    code: str
    text: str
    hint: str = ""
    until: float | None = None
    job_id: str = ""
    task_id: str = ""
    nodes: tuple[str, ...] = ()


CODES: Mapping[str, str] = {
    "ended": "The job has ended.",
    "decision": "The job waits for the operator's word.",
    "accepted": "Who or what accepted the job.",
    "paused": "The job, or the node, is paused.",
    "start": "The orchestrator has just started and waits for the nodes that were here before.",
    "workers": "Too few devices are here that could take part in a round.",
    "device": "A device does not fit: memory or type.",
    "busy": "A device works, or is about to work, for another job.",
    "turn": "Nothing stands in the way: it happens at the scheduler's next look.",
    "working": "Nodes are at work on it.",
    "quorum": "The round waits until enough submissions are in.",
    "grace": "The quorum is there; the round waits a while for the others.",
    "checking": "Submissions are being checked.",
    "merge": "The round is being merged.",
    "evaluation": "The last version's held-out loss is awaited.",
    "task": "A queued task has no device, and why.",
    "more": "There are more things of this kind than are listed.",
    "offline": "The node is gone.",
    "degraded": "The node is silent: it keeps its tasks and gets no new ones.",
    "session": "The node has no stream to the orchestrator.",
    "quarantined": "The node is quarantined.",
    "banned": "The node's key is shut out.",
    "drain": "The node finishes what it has and leaves.",
    "member": "The node's part of the round is done, or was given away.",
    "resting": "A task failed on the node, and no other can take it: it rests a while.",
    "late": "The round was opened without the node, which gets a share of the rest, or waits.",
    "declined": "The node has just declined a task, and is left alone for a while.",
    "idle": "There is no work.",
    "slow": "The node's downloads take longer than the job's rounds: it fetches ahead first.",
    "http": "The node has its stream, but its blobs do not come through over HTTP.",
}
"""Every code of a reason, with what it means; the docs print it."""


@dataclass(frozen=True, slots=True)
class JobWhy:
    """Why a job is where it is. ``waiting`` is False when it has ended, or works and nothing of it
    is held up."""

    id: str
    name: str
    state: str
    now: float
    waiting: bool
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What one device of a node holds; no task: it is free. ``since`` in database time."""

    device: int
    type: str
    memory_mb: int
    task_id: str = ""
    job_id: str = ""
    phase: str = ""
    round: int = 0
    since: float | None = None


@dataclass(frozen=True, slots=True)
class NodeWhy:
    """What a node holds, and why it gets no more. ``able``: the scheduler would give it work."""

    id: str
    name: str
    liveness: str
    standing: str
    intent: str
    last_heard_at: float
    now: float
    able: bool
    devices: tuple[Held, ...]
    reasons: tuple[Reason, ...]


def obstacles(
    liveness: Liveness,
    standing: Standing,
    intent: Intent,
    connected: bool,
    silent_s: float,
    *,
    ordered: Intent = Intent.CONTRIBUTE,
    why: str = "",
    rests: str = "",
) -> tuple[Reason, ...]:
    """Why a node gets no work, whatever work there is; nothing when it may be given some.

    ``connected``: it has an open session. ``silent_s``: seconds since it was heard. ``ordered``:
    what the operator wants of it. ``why``: the reason of its standing. ``rests``: why it pauses, in
    its own words; empty where it does not say.
    """
    found = []
    because = f" The reason: {why.rstrip('.')}." if why else ""
    lift = "`distribai nodes pardon NODE --why ...` lets it work again."
    if standing is Standing.BANNED:
        found.append(Reason("banned", f"Its key is shut out.{because}", lift))
    elif standing is Standing.QUARANTINED:
        text = f"It is quarantined: it gets no work until the operator has looked.{because}"
        found.append(Reason("quarantined", text, lift))
    if liveness is Liveness.OFFLINE:
        text = f"It is offline: it was last heard {_ago(silent_s)}."
        found.append(Reason("offline", text, "Start it: `distribai node start` on that machine."))
    elif liveness is Liveness.DEGRADED:
        text = (
            f"It is degraded: it was last heard {_ago(silent_s)}. It keeps what it has and gets "
            "nothing new until it is heard again."
        )
        found.append(Reason("degraded", text, "Look at its network, and whether it sleeps."))
    elif not connected:
        text = "It has no stream to the orchestrator, which has just started or lost it."
        found.append(Reason("session", text))
    if ordered is Intent.DRAIN:
        text = "The operator has told it to drain: it finishes what it has and leaves."
        found.append(Reason("drain", text))
    elif ordered is Intent.PAUSE:
        text = "The operator has paused it."
        found.append(Reason("paused", text, "`distribai nodes resume NODE` lets it work again."))
    elif intent is Intent.DRAIN:
        found.append(Reason("drain", "It drains: it finishes what it has and leaves."))
    elif intent is Intent.PAUSE:
        text = f"It is paused: {rests.rstrip('.') or 'its owner wants no work for now'}."
        found.append(Reason("paused", text))
    return tuple(found)


def no_blobs(trouble: str) -> tuple[Reason, ...]:
    """That a node which has its stream gets no blobs, if it says so (``Machine.trouble``)."""
    if not trouble:
        return ()
    text = (
        "It reaches the grid's stream, but its blobs do not come through over HTTP, so its tasks "
        f"wait or fail: {trouble.rstrip('.')}."
    )
    return (Reason("http", text, REACH_HTTP),)


REACH_HTTP = (
    "The join link has an address of its own for HTTP: see that firewalls and proxies let that "
    "machine through to it. If it is the wrong one, the operator sets orchestrator.public_http and "
    "gives the new link."
)
"""What to do about a node whose blobs do not come through."""


def too_slow(name: str, job_id: str, tasks: int, following: int | None) -> Reason:
    """That task after task of job ``name`` ended on a node before its first step; it gets the next
    one in round ``following``, counted from 0; None: in the next that opens."""
    text = (
        f"Job {name}: its last {tasks} tasks in a row were over before their first step: its "
        "downloads take longer than the job's rounds. What it has fetched is kept, and it goes on "
        "fetching"
    )
    if following is not None:
        text += f"; it is left out until round {following + 1}, if rounds can do without it"
    return Reason("slow", f"{text}.", FASTER, job_id=job_id)


FASTER = (
    "If it does not catch up: a faster line (or a higher --down-mbps), or a job with longer rounds "
    "(rounds.inner_steps) or a smaller model."
)
"""What to do about a node whose downloads take too long."""


def misfit(probe: QueuedTask, devices: Sequence[FreeDevice], now: float) -> str:
    """Why none of ``devices``, were they all free and for this task alone, could run it; empty when
    one could."""
    _, reasons = match([probe], devices, now)
    return _cause(reasons[probe.task_id]) if reasons else ""


def tasks_without_device(
    queued: Sequence[QueuedTask],
    devices: Sequence[FreeDevice],
    now: float,
    job_id: str,
    tags: Tags = NO_TAGS,
) -> tuple[Reason, ...]:
    """Why each queued task of a job has no device, in the order in which they are served."""
    _, reasons = match(queued, devices, now, tags)
    mine = [t for t in queued if t.job_id == job_id and t.task_id in reasons]
    found = [
        Reason(
            "task",
            f"A queued task ({t.phase}): {reasons[t.task_id]}.",
            job_id=job_id,
            task_id=t.task_id,
            nodes=(t.only,) if t.only else (),
        )
        for t in mine
    ]
    return cut(found, "queued tasks")


def passed_over(
    queued: Sequence[QueuedTask],
    devices: Sequence[FreeDevice],
    now: float,
    node_id: str,
    tags: Tags = NO_TAGS,
) -> tuple[Reason, ...]:
    """Why the queued tasks do not go to the free devices of a node, one reason for each job, phase
    and cause; what goes to it at the next look comes first."""
    own = [d for d in devices if d.node_id == node_id]
    matches, _ = match(queued, devices, now, tags)
    given = {m.task_id: m for m in matches}
    coming, others = list[Reason](), dict[tuple[str, str, str], Reason]()
    causes: dict[tuple[object, ...], str] = {}
    for task in queued:
        found = given.get(task.task_id)
        if found is not None and found.node_id == node_id:
            text = f"A {task.phase} task is about to be given to device {found.device}."
            coming.append(Reason("turn", text, job_id=task.job_id, task_id=task.task_id))
            continue
        needs = (task.memory_mb, task.device, task.needs)
        if needs not in causes:
            # The node's bars are lifted to see whether the device itself would do.
            bare = replace(task, excluded=frozenset(), only="", among=None)
            causes[needs] = misfit(bare, own, now) if own else "no device of this node is free"
        cause = _not_here(task, found, causes[needs], node_id)
        reason = Reason(
            "task",
            f"A queued task ({task.phase}) does not come here: {cause}.",
            job_id=task.job_id,
            task_id=task.task_id,
        )
        others.setdefault((task.job_id, task.phase, cause), reason)
    return cut([*coming, *others.values()], "reasons")


def _not_here(task: QueuedTask, given: Match | None, misfits: str, node_id: str) -> str:
    if task.only and task.only != node_id:
        return "it is kept for the node that it was meant for"
    if misfits:
        return misfits
    if task.among is not None and node_id not in task.among:
        return "it could not be finished here before its round merges"
    if node_id in task.excluded:
        return "an attempt of it failed here, and another node can take it"
    if given is not None:
        return "another device suits it better"
    return "tasks before it take the devices"


def cut(reasons: Sequence[Reason], what: str) -> tuple[Reason, ...]:
    """The first :data:`MAX_LISTED`, and how many more there are."""
    if len(reasons) <= MAX_LISTED:
        return tuple(reasons)
    more = Reason("more", f"And {len(reasons) - MAX_LISTED} more {what}.")
    return (*reasons[:MAX_LISTED], more)


def names(nodes: Iterable[str]) -> tuple[str, ...]:
    """Node ids, each once, in order, at most :data:`MAX_LISTED`."""
    return tuple(sorted(set(nodes) - {""})[:MAX_LISTED])


def _cause(reason: str) -> str:
    """A reason of :func:`match` without how long the task has waited."""
    return reason.partition("; it has waited ")[0]


def _ago(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s ago"
