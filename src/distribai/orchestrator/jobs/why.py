"""Why a job is where it is, computed on request from what the duties themselves decide by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distribai.core.plan import needs_of, task_memory_mb
from distribai.core.scheduling import FreeDevice, QueuedTask
from distribai.core.spec import JobSpec
from distribai.core.states import (
    JOB,
    Intent,
    JobState,
    Liveness,
    RoundState,
    Standing,
    TaskState,
    is_terminal,
)
from distribai.core.why import (
    JobWhy,
    Reason,
    cut,
    misfit,
    names,
    obstacles,
    tasks_without_device,
)
from distribai.orchestrator.context import Grid
from distribai.orchestrator.jobs.rows import get_job
from distribai.orchestrator.rounds.decisions import view_round
from distribai.orchestrator.rounds.opening import (
    REJOIN_HEARTBEATS,
    AbleDevice,
    able_devices,
    candidates,
    still_coming_back,
    training_devices,
    waits_for,
)
from distribai.orchestrator.rounds.picture import Picture, look
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.engine import AnyRow, Tx
from distribai.store.statements import watching, work

UNDER_WAY = frozenset({RoundState.OPEN.value, RoundState.CLOSING.value})


async def why_job(grid: Grid, job_id: str) -> JobWhy:
    """Why the job is where it is, from one snapshot of the database.

    Raises:
        NotFound: ``job.unknown``.
    """
    async with grid.db.read() as tx:
        job = await get_job(tx, job_id)
        reasons = await _reasons(grid, tx, job)
    working = reasons and all(r.code in ("working", "checking", "merge") for r in reasons)
    return JobWhy(
        id=job.id,
        name=job.name,
        state=job.state,
        now=tx.now,
        waiting=not working and not is_terminal(JOB, JobState(job.state)),
        reasons=tuple(reasons),
    )


async def _reasons(grid: Grid, tx: Tx, job: AnyRow) -> list[Reason]:
    state = JobState(job.state)
    if is_terminal(JOB, state):
        why = f": {job.reason}" if job.reason else ""
        return [Reason("ended", _sentence(f"It is {state.value}{why}"))]
    if state is JobState.SUBMITTED:
        hint = f"`distribai job accept {job.id}`, or `distribai job decline {job.id} --why ...`."
        told = f"It waits for the operator's decision. {job.decision}".rstrip()
        return [Reason("decision", told, hint)]
    leased = await work.tasks_in(tx, (TaskState.LEASED,), job_id=job.id)
    picture = await look(grid, tx)
    queued = _without_device(picture, job.id)
    if state is JobState.PAUSED:
        why = f": {job.reason}" if job.reason else ""
        hint = f"`distribai job resume {job.id}` lets it go on."
        text = _sentence(f"It is paused{why}")
        return [Reason("paused", f"{text} Nothing of it is leased.", hint), *queued]
    row = await work.latest_round(tx, job.id)
    if row is not None and row.state in UNDER_WAY:
        return [*await _round(grid, tx, job, row, leased), *queued]
    if job.version >= job.rounds_total:
        return [_evaluation(job, leased), *queued]
    said = state is JobState.QUEUED and job.decision
    accepted = [Reason("accepted", job.decision)] if said else []
    return [*_working(leased), *await _opening(grid, tx, job), *queued, *accepted]


async def _round(
    grid: Grid, tx: Tx, job: AnyRow, row: AnyRow, leased: Sequence[AnyRow]
) -> list[Reason]:
    """What a round that is under way waits for."""
    name = f"Round {row.number + 1}"
    if row.state == RoundState.CLOSING:
        return [Reason("merge", f"{name} is being merged.")]
    view = await view_round(tx, spec_of(job), row, grid.not_before)
    found = _working(leased)
    if view.checking:
        many = view.checking > 1
        count = f"{view.checking} submission{'s' if many else ''}"
        wait = "wait" if many else "waits"
        found.append(Reason("checking", f"{count} of {name.lower()} {wait} to be checked."))
    decision = view.decision
    missing = names(
        t.node_id if t.state == TaskState.LEASED else t.member_id
        for t in view.tasks
        if t.state in (TaskState.LEASED, TaskState.QUEUED)
    )
    if decision.action != "wait":
        verb = "merged" if decision.action == "merge" else "abandoned and opened again"
        text = _sentence(f"{name} is about to be {verb}: {decision.reason}")
        return [*found, Reason("merge", text)]
    code = "quorum" if decision.until is None else "grace"
    text = _sentence(f"{name} waits: {decision.reason}")
    return [*found, Reason(code, text, until=decision.until, nodes=missing)]


async def _opening(grid: Grid, tx: Tx, job: AnyRow) -> list[Reason]:
    """Why no round is open."""
    spec = spec_of(job)
    if await still_coming_back(grid, tx):
        until = grid.started_at + REJOIN_HEARTBEATS * grid.settings.liveness.heartbeat_s
        text = "The orchestrator has just started: a round opens when the nodes are back."
        return [Reason("start", text, until=until)]
    devices, training = await able_devices(tx), await training_devices(tx)
    waits = waits_for(job, devices, training)
    if not waits:
        tick = grid.settings.liveness.tick_s
        text = f"Nothing stands in the way: a round opens within {tick:g} s."
        return [Reason("turn", text, until=tx.now + tick)]
    hint = "`distribai nodes list` shows who is here; workers_min is in the job's recipe."
    found = [Reason("workers", _sentence(f"Too few workers for a round: {waits}"), hint)]
    here = {(d.node_id, d.index) for d in candidates(spec, devices, training, job.id)}
    found += _unfit(grid, job, spec, [d for d in devices if (d.node_id, d.index) not in here], tx)
    found += await _not_able(grid, tx)
    return found


def _unfit(
    grid: Grid, job: AnyRow, spec: JobSpec, others: Sequence[AbleDevice], tx: Tx
) -> list[Reason]:
    """Devices that are here and cannot take part: they do not fit, or are busy with other jobs."""
    probe = probe_of(job, spec, tx.now)
    causes: dict[str, list[str]] = {}
    busy = []
    for device in others:
        cause = misfit(probe, [as_free(device)], tx.now)
        if cause:
            causes.setdefault(cause, []).append(device.node_id)
        else:
            busy.append(device.node_id)
    found = [
        Reason("device", _sentence(f"{_devices(nodes)} not fit: {cause}"), nodes=names(nodes))
        for cause, nodes in causes.items()
    ]
    if busy:
        subject = "1 device works" if len(busy) == 1 else f"{len(busy)} devices work"
        found.append(Reason("busy", f"{subject} for other jobs.", nodes=names(busy)))
    return list(cut(found, "causes"))


async def _not_able(grid: Grid, tx: Tx) -> list[Reason]:
    """Nodes that are not given up and get no work, each with why."""
    found = []
    for node in await watching.nodes_for_why(tx):
        for reason in obstacles_of(node, tx.now):
            if reason.code in ("degraded", "session", "paused", "drain"):
                text = f"{node.name or node.id}: {reason.text}"
                found.append(Reason(reason.code, text, reason.hint, nodes=(node.id,)))
    return list(cut(found, "nodes"))


def _evaluation(job: AnyRow, leased: Sequence[AnyRow]) -> Reason:
    text = f"All {job.rounds_total} rounds are merged; the last version's held-out loss is awaited."
    return Reason("evaluation", text, nodes=names(t.node_id for t in leased))


def _working(leased: Sequence[AnyRow]) -> list[Reason]:
    if not leased:
        return []
    nodes = {t.node_id for t in leased}
    phases: dict[str, int] = {}
    for task in leased:
        phases[task.phase] = phases.get(task.phase, 0) + 1
    what = ", ".join(f"{n} {phase}" for phase, n in sorted(phases.items()))
    subject = "1 node works" if len(nodes) == 1 else f"{len(nodes)} nodes work"
    return [Reason("working", f"{subject} on tasks: {what}.", nodes=names(nodes))]


def _without_device(picture: Picture, job_id: str) -> list[Reason]:
    found = list(
        tasks_without_device(picture.queued, picture.free, picture.now, job_id, picture.tags)
    )
    for task in picture.hopeless:
        if task.job_id == job_id:
            text = "A queued task: nobody could finish it before its round merges."
            found.append(Reason("task", text, job_id=job_id, task_id=task.id))
    for task in picture.kept:
        if task.job_id == job_id:
            text = (
                f"A queued task of round {task.round + 1}: it is kept for the node that fell "
                "silent with it; what that brings in time counts."
            )
            nodes = names([task.node_id])
            found.append(Reason("task", text, job_id=job_id, task_id=task.id, nodes=nodes))
    for task in picture.resting:
        if task.job_id == job_id:
            text = f"A queued task ({task.phase}): its last attempt failed, and it rests a while."
            hint = f"`distribai job logs {job_id}` shows why it failed."
            found.append(
                Reason("task", text, hint, task.not_before, job_id=job_id, task_id=task.id)
            )
    return found


def obstacles_of(node: AnyRow, now: float) -> tuple[Reason, ...]:
    """Why a node (a row of ``watching.nodes_for_why``) gets no work, whatever work there is."""
    return obstacles(
        Liveness(node.liveness),
        Standing(node.standing),
        Intent(node.intent),
        bool(node.connected),
        now - node.last_heard_at,
        ordered=Intent(node.ordered),
        why=node.standing_reason,
        rests=node.intent_reason,
    )


def probe_of(job: AnyRow, spec: JobSpec, now: float) -> QueuedTask:
    """A training task as the job's next round would have it."""
    return QueuedTask(
        task_id="probe",
        job_id=job.id,
        phase="train",
        priority=spec.priority,
        queued_at=now,
        memory_mb=task_memory_mb(spec),
        device=spec.resources.device,
        needs=needs_of(spec),
    )


def as_free(device: AbleDevice) -> FreeDevice:
    """A device as the matching would see it, were it free and cold."""
    return FreeDevice(device.node_id, device.index, device.type, device.memory_mb, has=device.has)


def _devices(nodes: Iterable[str]) -> str:
    count = len(list(nodes))
    return "1 device does" if count == 1 else f"{count} devices do"


def _sentence(text: str) -> str:
    return text.rstrip(".") + "."
