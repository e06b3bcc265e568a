"""Answers to "why does nothing start?"; what the codes of reasons mean is in the reference."""

from __future__ import annotations

from distribai.api.answers import Answer


class Reason(Answer):
    """One thing that is waited for, or that stands in the way. ``code`` is stable, ``text`` a
    sentence, ``hint`` what can be done, ``until`` when it passes at the latest."""

    code: str
    text: str
    hint: str = ""
    until: float | None = None
    job_id: str = ""
    task_id: str = ""
    nodes: tuple[str, ...] = ()


class JobWhy(Answer):
    """Why a job is where it is. ``waiting`` is false when it has ended or nothing holds it up."""

    id: str
    name: str
    state: str
    now: float
    waiting: bool
    reasons: list[Reason]


class Held(Answer):
    """What one device of a node holds; an empty ``task_id``: it is free. ``round`` is the version
    that the task starts from, or looks at."""

    device: int
    type: str
    memory_mb: int
    task_id: str = ""
    job_id: str = ""
    phase: str = ""
    round: int = 0
    since: float | None = None


class NodeWhy(Answer):
    """What a node holds and why it gets no more. ``able``: the scheduler would give it work."""

    id: str
    name: str
    liveness: str
    standing: str
    intent: str
    last_heard_at: float
    now: float
    able: bool
    devices: list[Held]
    reasons: list[Reason]
