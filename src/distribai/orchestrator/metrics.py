"""Figures for Prometheus: what this process did, and how the grid stands.

Two kinds, and their names say which:

- ``distribai_...`` of *this process*: counters and histograms that start at 0 with it. Sum them
  over replicas.
- ``distribai_grid_...`` of *the grid*: read from the database, the same at every replica. Take the
  maximum over replicas, never the sum. They are read at most every :data:`FRESH_S` seconds, however
  often and by however many they are asked for.

Labels take few values that are known beforehand (states, phases, kinds, routes), never the id or
name of a job, node, account or blob: those come without end, each would be a series for ever, and
``/metrics`` may be seen by people who must not see them. What one job or node does is told by the
interface (``/api/v1/jobs/{ref}``, ``/why``, ``/events``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from distribai import __version__
from distribai.core.states import JobState, Liveness, RoundState, Standing, TaskState
from distribai.core.tasks import Phase
from distribai.orchestrator.fleet import replicas
from distribai.store.statements import watching

if TYPE_CHECKING:
    from distribai.orchestrator.context import Grid

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The text format that every scraper reads."""

FRESH_S = 5.0
"""Seconds for which the grid's figures are kept: counting reads whole indexes."""

_FINE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds: from a statement to a merge."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"})
_KINDS = frozenset({"weights", "update", "delta", "data", "other"})
_DUTIES = ("control", "verify", "merge", "clean", "webhooks")
_PHASES: tuple[Phase, ...] = ("train", "evaluate", "generate")


class Metrics:
    """The instruments of one process. Each of its methods is cheap and never fails."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._work()
        self._database()
        self._served()
        self._grid()
        ProcessCollector(registry=self.registry)
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    def _work(self) -> None:
        """What this process is, moves and does."""
        registry = self.registry
        build = Gauge("distribai_build_info", "The program.", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self._bytes = Counter(
            "distribai_bytes",
            "Bytes of blobs between nodes and this process; up is from a node.",
            ["leg", "kind"],
            registry=registry,
        )
        self._duties = Histogram(
            "distribai_duty_seconds",
            "One look of a duty.",
            ["duty"],
            buckets=_FINE,
            registry=registry,
        )
        for duty in _DUTIES:
            self._duties.labels(duty)

    def _database(self) -> None:
        """This process's transactions."""
        registry = self.registry
        self._waits = Histogram(
            "distribai_db_wait_seconds",
            "From asking for a transaction to its beginning.",
            ["mode"],
            buckets=_FINE,
            registry=registry,
        )
        self._transactions = Histogram(
            "distribai_db_transaction_seconds",
            "From a transaction's beginning to its end.",
            ["mode"],
            buckets=_FINE,
            registry=registry,
        )
        for mode in ("read", "write"):
            self._waits.labels(mode)
            self._transactions.labels(mode)

    def _served(self) -> None:
        """Whom this process serves."""
        registry = self.registry
        self._requests = Counter(
            "distribai_http_requests",
            "Answered HTTP requests; status 0: the client went away before.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._request_seconds = Histogram(
            "distribai_http_request_seconds",
            "From a request's head to the end of its answer; waiting for events counts.",
            ["method", "route"],
            buckets=_FINE,
            registry=registry,
        )
        self._streams = Gauge(
            "distribai_streams", "Streams of nodes that are open here.", registry=registry
        )
        self._readers = Gauge(
            "distribai_event_streams", "Streams of events that are open here.", registry=registry
        )
        self._slow = Counter(
            "distribai_event_streams_slow",
            "Streams of events that were ended because nobody read them.",
            registry=registry,
        )
        self._sessions = Gauge(
            "distribai_sessions",
            "Sessions of nodes that this process keeps, with or without a stream.",
            registry=registry,
        )
        self._uploads = Gauge(
            "distribai_uploads", "Uploads begun here and not finished.", registry=registry
        )

    def _grid(self) -> None:
        """What is read from the database."""
        registry = self.registry
        self._jobs = Gauge("distribai_grid_jobs", "Jobs.", ["state"], registry=registry)
        self._tasks = Gauge(
            "distribai_grid_tasks",
            "Tasks that there ever were; accepted, rejected and superseded ones are submissions "
            "judged so.",
            ["state", "phase"],
            registry=registry,
        )
        self._nodes = Gauge(
            "distribai_grid_nodes", "Nodes.", ["liveness", "standing"], registry=registry
        )
        self._rounds = Gauge(
            "distribai_grid_rounds", "Rounds that there ever were.", ["state"], registry=registry
        )
        self._tokens = Gauge(
            "distribai_grid_tokens_accepted", "Target tokens of accepted work.", registry=registry
        )
        self._replicas = Gauge(
            "distribai_grid_replicas",
            "Replicas that are here, and that are gone for less than an hour; none on SQLite.",
            ["state"],
            registry=registry,
        )
        self._read = Gauge(
            "distribai_grid_read_timestamp_seconds",
            "When the grid's figures were read, in database time.",
            registry=registry,
        )

    def moved(self, sums: Mapping[tuple[str, str, str], tuple[int, int]]) -> None:
        """Bytes (up, down) by (job, node, kind) that were written to the database."""
        for (_, _, kind), (up, down) in sums.items():
            known = kind if kind in _KINDS else "other"
            self._bytes.labels("up", known).inc(up)
            self._bytes.labels("down", known).inc(down)

    def looked(self, duty: str, seconds: float) -> None:
        """One look of a duty took so long, also when it failed."""
        self._duties.labels(duty).observe(seconds)

    def transaction(self, mode: str, waited: float, held: float) -> None:
        """A transaction (``read`` or ``write``) began after ``waited`` seconds, took ``held``."""
        self._waits.labels(mode).observe(waited)
        self._transactions.labels(mode).observe(held)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered. ``route`` is a template of ours, never what somebody asked for;
        empty when there was none."""
        method = method if method in _METHODS else "other"
        route = route or "none"
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(method, route).observe(seconds)

    def slow_reader(self) -> None:
        """A stream of events was ended because nobody read it."""
        self._slow.inc()

    async def page(self, grid: Grid) -> bytes:
        """The page that a scraper reads.

        Raises:
            Unavailable: ``grid.database``.
        """
        self._streams.set(sum(s.stream is not None for s in grid.fleet))
        self._readers.set(grid.tail.readers)
        self._sessions.set(len(grid.fleet.sessions))
        self._uploads.set(grid.blobs.uploads.begun)
        async with self._reading:
            if self._read_at is None or grid.clock() - self._read_at >= FRESH_S:
                await self._read_grid(grid)
                self._read_at = grid.clock()
        return generate_latest(self.registry)

    async def _read_grid(self, grid: Grid) -> None:
        async with grid.db.read() as tx:
            jobs = await watching.count_jobs(tx)
            tasks = await watching.count_tasks(tx)
            nodes = await watching.count_nodes(tx)
            rounds = await watching.count_rounds(tx)
            shown = await replicas.shown(tx)
        _set(self._jobs, ((j.value,) for j in JobState), {(r.state,): r.number for r in jobs})
        _set(
            self._tasks,
            ((t.value, p) for t in TaskState for p in _PHASES),
            {(r.state, r.phase): r.number for r in tasks},
        )
        _set(
            self._nodes,
            ((n.value, s.value) for n in Liveness for s in Standing),
            {(r.liveness, r.standing): r.number for r in nodes},
        )
        _set(self._rounds, ((r.value,) for r in RoundState), {(r.state,): r.number for r in rounds})
        here = sum(r.here for r in shown)
        self._replicas.labels("here").set(here)
        self._replicas.labels("gone").set(len(shown) - here)
        self._tokens.set(sum(int(r.tokens) for r in jobs))
        self._read.set(tx.now)


def _set(
    gauge: Gauge, labels: Iterable[tuple[str, ...]], found: Mapping[tuple[str, ...], int]
) -> None:
    """Every value that can be, 0 as well: a series that comes and goes cannot be alerted on."""
    for key in labels:
        gauge.labels(*key).set(found.get(key, 0))
