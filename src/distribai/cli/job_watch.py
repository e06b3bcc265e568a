"""Following a job to its end: a live display on a terminal, lines elsewhere, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from distribai.cli import job_views, output
from distribai.cli.watching import EVERY_S, Patience
from distribai.cli.words import waits_words
from distribai.core.states import JOB, JobState, is_terminal

if TYPE_CHECKING:
    from distribai.api.answers import JobRecord, LogRecord
    from distribai.client import Client

LINE_EVERY_S = 10.0
"""Seconds between two plain lines about the same round."""


class Display(Protocol):
    """Where a followed job is shown: :meth:`show` after each look, :meth:`close` at the end."""

    def show(self, job: JobRecord) -> None: ...

    def close(self) -> None: ...


def follow(
    client: Client,
    ref: str,
    as_json: bool,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Show a job until it has ended: 0 when it completed, else 1. Ctrl-C (130) lets it run on."""
    patience = Patience(clock, sleep)
    job = patience.call(partial(client.job, ref))
    waits = waits_words(client, job.id) if job.state == JobState.SUBMITTED else ""
    display = display_of(as_json, clock)
    try:
        while True:
            display.show(job)
            if has_ended(job):
                break
            sleep(EVERY_S)
            job = patience.call(partial(client.job, job.id))
    except KeyboardInterrupt:
        display.close()
        if job.state == JobState.SUBMITTED:
            output.note(waits)
        else:
            output.note(f"The job goes on. Follow it again: distribai job watch {job.id}")
        return 130
    display.close()
    if not as_json:
        _farewell(job)
    return 0 if job.state == JobState.COMPLETED else 1


def stream_logs(client: Client, ref: str, follow: bool, as_json: bool) -> None:
    """Print a job's log lines; with ``follow`` until the job has ended and all are printed."""
    patience = Patience()
    cursor, gathered = "", list["LogRecord"]()
    job_id = client.job(ref).id
    while True:
        ended = follow and has_ended(patience.call(partial(client.job, job_id)))
        wait = LINE_EVERY_S if follow and not ended else 0.0
        found = patience.call(partial(client.logs, job_id, cursor, wait))
        for line in found:
            if not as_json:
                output.data(job_views.log_line(line))
            elif follow:
                output.json_line(line)
            else:
                gathered.append(line)
        sys.stdout.flush()
        cursor = found[-1].cursor if found else cursor
        if not found and (ended or not follow):
            break
    if as_json and not follow:
        output.document(gathered)
    elif not cursor:
        output.note("Nobody has written anything about the job.")


def has_ended(job: JobRecord) -> bool:
    """Whether nothing more will happen to the job."""
    return is_terminal(JOB, JobState(job.state))


def display_of(as_json: bool, clock: Callable[[], float]) -> Display:
    """The display that fits stdout: JSON lines, a live panel on a terminal, or lines."""
    if as_json:
        return _JsonLines()
    if sys.stdout.isatty():
        from distribai.cli.job_live import LiveDisplay

        return LiveDisplay()
    return _Lines(clock)


class _JsonLines:
    """A document whenever something changed."""

    def __init__(self) -> None:
        self._last: object = None

    def show(self, job: JobRecord) -> None:
        shown = output.plain(job)
        # The time of the answer changes always and means nothing.
        told = {k: v for k, v in shown.items() if k != "now"}
        if told != self._last:
            output.json_line(shown)
            self._last = told

    def close(self) -> None:
        sys.stdout.flush()


class _Lines:
    """A line when the state or the round changes, and every :data:`LINE_EVERY_S` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: object = None
        self._at = float("-inf")

    def show(self, job: JobRecord) -> None:
        key = (job.state, job.version, job.waiting_for)
        if key == self._last and self._clock() - self._at < LINE_EVERY_S:
            return
        self._last, self._at = key, self._clock()
        output.data(output.visible(job_views.progress_line(job)))
        sys.stdout.flush()

    def close(self) -> None:
        sys.stdout.flush()


def _farewell(job: JobRecord) -> None:
    if job.state == JobState.COMPLETED:
        output.note(
            f"Completed. Get the weights: distribai export-weights {job.id} "
            "--format safetensors --out model.safetensors"
        )
    else:
        why = f": {job.reason}" if job.reason else ""
        output.note(f"The job is {job.state}{why}. What happened: distribai job logs {job.id}")
