"""What people see of jobs: pure functions from answers to text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distribai.cli import output
from distribai.cli.forecast import forecast_words, measured_words
from distribai.core.tasks import works_on

if TYPE_CHECKING:
    from distribai.api.answers import (
        JobRecord,
        JobSummary,
        LogRecord,
        RoundProgress,
        RoundRecord,
        TaskRecord,
        VersionRecord,
    )


def jobs_table(jobs: list[JobSummary]) -> str:
    """A line for each job."""
    return output.table(
        ("ID", "NAME", "STATE", "ROUND", "NODES", "HELD-OUT", "CREATED"),
        [
            (
                job.id[:12],
                job.name,
                job.state,
                f"{job.version}/{job.rounds_total}",
                str(job.nodes_working),
                output.loss(job.held_out_loss),
                moment(job.created_at),
            )
            for job in jobs
        ],
    )


def rounds_table(rounds: list[RoundRecord]) -> str:
    """A line for each round."""
    return output.table(
        ("ROUND", "TRY", "STATE", "MEMBERS", "ACCEPTED", "TOKENS", "TOOK", "REASON"),
        [
            (
                str(r.number + 1),
                str(r.take + 1),
                r.state,
                str(len(r.members)),
                str(r.accepted),
                output.count(r.tokens),
                output.duration(None if r.closed_at is None else r.closed_at - r.opened_at),
                r.reason,
            )
            for r in rounds
        ],
    )


def tasks_table(tasks: list[TaskRecord]) -> str:
    """A line for each task."""
    return output.table(
        ("ID", "PHASE", "WORKS ON", "STATE", "NODE", "TRY", "STEP", "LOSS", "REASON"),
        [
            (
                t.id[:13],
                t.phase,
                works_on(t.phase, t.round),
                t.state,
                t.node_id[:13],
                str(t.attempt),
                f"{t.step}/{t.steps}" if t.steps else "-",
                output.loss(t.loss),
                t.reason,
            )
            for t in tasks
        ],
    )


def versions_table(versions: list[VersionRecord]) -> str:
    """A line for each version."""
    return output.table(
        ("VERSION", "HELD-OUT", "CONTRIBUTORS", "TOKENS", "SNAPSHOT", "HASH"),
        [
            (
                str(v.version),
                output.loss(v.held_out_loss),
                str(v.contributors),
                output.count(v.tokens),
                "on demand" if v.weights is None else f"kept, {output.size(v.weights.size)}",
                v.weights_hash[:12],
            )
            for v in versions
        ],
    )


def job_facts(job: JobRecord) -> list[tuple[str, str]]:
    """Everything about a job, for people."""
    spec = job.spec
    data = spec.data.source if not spec.data.files else output.plural(len(spec.data.files), "file")
    pairs = [
        ("id", job.id),
        ("name", job.name),
        ("state", job.state + (f": {job.reason}" if job.reason else "")),
        ("waiting for", job.waiting_for),
        (
            "model",
            f"{spec.model.family} {spec.model.profile}, {output.count(job.parameters)} parameters",
        ),
        ("data", data),
        (
            "steps",
            f"{spec.steps} of {spec.batch} x {spec.seq_len} tokens a worker, "
            f"{spec.rounds.inner_steps} a round",
        ),
        ("workers", f"{spec.workers_min} to {spec.workers_max}"),
        ("priority", spec.priority),
        ("weight", "" if job.weight == 1 else f"{job.weight:g}"),
        ("retry of", job.retry_of),
        ("round", f"{job.version} of {job.rounds_total} merged"),
        ("nodes", f"{job.nodes_working} at work"),
        ("tokens", output.count(job.tokens)),
        ("held-out loss", held_out_words(job)),
        ("bytes", bytes_words(job)),
        ("forecast", "" if job.forecast is None else forecast_words(job.forecast)),
        ("measured", "" if job.measured is None else measured_words(job.measured)),
        ("created", f"{moment(job.created_at)} by {job.created_by}"),
        ("started", moment(job.started_at)),
        ("ended", moment(job.ended_at)),
    ]
    return [(name, value) for name, value in pairs if value]


def held_out_words(job: JobRecord) -> str:
    """First and latest held-out loss that a node has measured."""
    measured = [h for h in job.held_out if h.loss is not None]
    if not measured:
        return ""
    last = measured[-1]
    words = f"{output.loss(last.loss)} (version {last.version})"
    if len(measured) > 1:
        words = f"{output.loss(measured[0].loss)} (version {measured[0].version}) -> {words}"
    return words


def latest_held_out(job: JobRecord) -> float | None:
    """The latest held-out loss there is."""
    return next((h.loss for h in reversed(job.held_out) if h.loss is not None), None)


def bytes_words(job: JobRecord) -> str:
    """Bytes from and to the nodes; *up* is from a node."""
    up, down = job.bytes.weights_up, job.bytes.weights_down
    data = job.bytes.data_up + job.bytes.data_down
    return f"{output.size(up)} up, {output.size(down)} down, data {output.size(data)}"


def active_round(job: JobRecord) -> RoundProgress | None:
    """The round that nodes work on now; a merged one waits for the next to open."""
    working = job.round is not None and job.round.state in ("open", "closing")
    return job.round if working else None


def eta_s(job: JobRecord) -> float | None:
    """Seconds to the end, also between two rounds; None when nobody can tell, or it is over."""
    return None if job.round is None else job.round.eta_s or None


def progress_line(job: JobRecord) -> str:
    """Where a job stands, on one line."""
    r = active_round(job)
    if r is None:
        words = [job.state, f"round {job.version}/{job.rounds_total}"]
    else:
        words = [
            job.state,
            f"round {r.number + 1}/{job.rounds_total}",
            f"step {r.step:.0f}/{r.steps}",
            nodes_words(job),
        ]
        if r.mean_loss is not None:
            words.append(f"loss {r.mean_loss:.3f}")
    if (held_out := latest_held_out(job)) is not None:
        words.append(f"held-out {held_out:.3f}")
    if r is not None and r.tokens_per_s:
        words.append(f"{output.count(r.tokens_per_s)} tokens/s")
    words.append(bytes_words(job))
    if eta := eta_s(job):
        words.append(f"ETA {output.duration(eta)}")
    if job.reason:
        words.append(job.reason)
    if job.waiting_for:
        words.append(f"waiting for {job.waiting_for}")
    return "  ".join(words)


def nodes_words(job: JobRecord) -> str:
    """How many nodes compute for the job at the moment; others of its nodes wait for the round."""
    return f"{output.plural(job.nodes_working, 'node')} at work"


def log_line(log: LogRecord) -> str:
    """One log line, for people."""
    who = log.node_id[:13] or "orchestrator"
    more = " ".join(f"{k}={v}" for k, v in log.fields.items())
    return output.visible(
        f"{moment(log.at)} {log.level.upper():<7} {who}  {log.message} {more}".rstrip()
    )


def moment(at: float | None) -> str:
    """A time in the reader's zone."""
    if at is None:
        return ""
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
