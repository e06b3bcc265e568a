"""The node daemon: ties link, worker, cache and governor together.

It runs under whatever event loop is there (``await Daemon(settings).run()`` in a notebook, or
:mod:`distribai.node.main`) and installs no signal handlers. A state directory belongs to one daemon
at a time; a fresh temporary one makes an ephemeral node.
"""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import replace
from pathlib import Path

import structlog

import distribai
from distribai import durable, wishes
from distribai.core.child import Checkpoints
from distribai.core.devices import Machine
from distribai.core.states import Intent
from distribai.errors import DistribAIError, UsageError
from distribai.node import identity
from distribai.node.begun import Begun
from distribai.node.benchmark import Meter, worth_telling
from distribai.node.blobs import BlobClient
from distribai.node.cache import BlobCache
from distribai.node.certificate import Certificate
from distribai.node.clock import Clock, SystemClock, within
from distribai.node.contact import Contact
from distribai.node.devices import threads
from distribai.node.executors import Services
from distribai.node.feedback import FeedbackStore
from distribai.node.fetching import Fetcher
from distribai.node.governor import Governor
from distribai.node.keeping import HandFiles
from distribai.node.link import Hello, Link
from distribai.node.platform import DirectoryLock
from distribai.node.traffic import Traffic
from distribai.node.transport import GrpcTransport, Transport
from distribai.node.trust import Trust
from distribai.node.worker import ISOLATION, Worker
from distribai.sections import NodeSettings
from distribai.wire import convert, joinlink
from distribai.wire.joinlink import JoinLink
from distribai.wire.machines import machine_to_wire
from distribai.wire.v1 import distribai_pb2 as pb

log = structlog.get_logger("distribai.node")

JOIN_FILE = "join"
"""Where a node that was taken keeps its join link, without the invite that it needs no more."""

STALE_LINK = frozenset({"node.link", "node.invite", "grid.ca"})
"""What ends a node whose join link is not, or no longer, its grid's."""

BLOBS_TOLD = 1000
"""Cached blobs that registering mentions, most recent first."""

FAREWELL_S = 60.0
"""How long a leaving node waits for its last results to be acknowledged."""

HURRY_S = 80.0
"""How long a node that was told to end at once may take for its step and upload. systemd kills 90 s
after a SIGTERM (``TimeoutStopSec``'s default); what is not delivered then stays in hand."""

WISH_S = 1.0
"""Seconds between two looks for the owner's wishes."""

CHECKPOINT_SHARE = 0.03
"""Share of the training time that checkpoints may take."""


class Daemon:
    """One node.

    Args:
        settings: where it keeps its state, which grid it joins, what it gives. An empty ``join``
            means the grid that the state directory belongs to.
        clock, rng: time and chance.
        transport: how the orchestrator is reached; gRPC to the join link's address by default.
        command: how the training child is started; this program's own by default.

    Raises:
        UsageError: ``node.join``, ``node.link`` or ``config.invalid``.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        transport: Transport | None = None,
        command: tuple[str, ...] = (),
    ) -> None:
        self._settings = settings
        self._join = join_link(settings)
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._trust = Trust(self._join, settings.state_dir)
        self._transport = transport
        self._command = command
        self._leaving = asyncio.Event()
        self._hurry = asyncio.Event()
        self._told: Machine | None = None
        self._started = self._clock.monotonic()
        self.governor = Governor(settings.share)

    async def run(self) -> None:
        """Work for the grid until told to finish; return when the node has left in order.

        Raises:
            DistribAIError: why it cannot go on: ``node.torch``, ``node.fenced``, ``node.invite``,
                ``protocol.version``, ``node.locked`` and others.
            OSError: the state directory cannot be used.
        """
        state = self._settings.state_dir
        with DirectoryLock(state):
            self._build(state)
            if wishes.read(state) == "finish":
                wishes.forget(state)  # it was meant for the daemon before this one
            try:
                await self._worker.start(self._settings.device, threads(self._settings.threads))
                self._meter = self._new_meter(state)
                await self._until_left()
            except DistribAIError as problem:
                if problem.code in STALE_LINK and not self._settings.join:
                    problem.hint = f"{problem.hint} {_kept_hint(self._settings)}".lstrip()
                self._contact.ended(problem)
                raise
            finally:
                await self._worker.close()
                await self._blobs.close()
                await asyncio.to_thread(self._traffic.close)

    def finish(self, *, partial: bool = False) -> None:
        """Take no more tasks and leave when the present ones are reported; ``partial`` ends them
        after the present step, with what was done."""
        self.governor.finish(partial=partial)

    def _build(self, state: Path) -> None:
        self._contact = Contact(state)
        key = identity.load_or_create(state)
        self._cache = BlobCache(state / "cache", self._settings.cache_bytes)
        begun = Begun(state, self._cache)
        self._feedback = FeedbackStore(state, self._settings.feedback_bytes)
        self._certificate = Certificate(self._join, self._trust, key, self._clock, self._rng)
        transport = self._transport or GrpcTransport(
            self._join.grpc, self._trust, self._certificate
        )
        self._link = Link(self._join, transport, key, self, self._clock, self._rng)
        self._traffic = Traffic(
            state,
            self._clock,
            up_mbps=self._settings.up_mbps,
            down_mbps=self._settings.down_mbps,
            month_bytes=self._settings.month_bytes,
            stream=lambda: self._link.bytes_up + self._link.bytes_down,
            changed=lambda: self.governor.spare(self._traffic.why_not()),
        )
        self._blobs = BlobClient(
            self._join.http_url,
            lambda: self._link.session_token,
            self._clock,
            self._rng,
            traffic=self._traffic,
            trust_env=not self._join.loopback,
            verify=self._trust.context,
        )

        def services(worker: Worker) -> Services:
            return Services(
                cache=self._cache,
                blobs=self._blobs,
                fetcher=Fetcher(self._cache, self._blobs),
                begun=begun,
                clock=self._clock,
                listener=worker,
                log_dir=state / "log",
                gate=lambda: self.governor.gate,
                feedback=self._feedback,
                command=self._command,
                checkpoints=Checkpoints(
                    self._settings.checkpoint_s, CHECKPOINT_SHARE, self._settings.checkpoint_bytes
                ),
                progress_s=self._settings.progress_s,
            )

        self._worker = Worker(
            services,
            HandFiles(state),
            self.governor,
            key,
            self._link.send,
            self._link.beat,
        )
        self.governor.listen(self._on_governor)
        self._on_governor()

    def _new_meter(self, state: Path) -> Meter:
        return Meter(
            state=state,
            clock=self._clock,
            places=self._worker.places,
            torch=self._worker.torch,
            measure=self._worker.measure,
            idle=lambda: self._worker.idle,
            link=self._traffic.figures,
            isolation=ISOLATION,
            changed=self._link.beat,
        )

    def _on_governor(self) -> None:
        self._worker.regulate()
        self._link.beat()
        if self.governor.intent is Intent.DRAIN:
            self._leaving.set()
        if self.governor.gate.finish:
            self._hurry.set()

    async def _until_left(self) -> None:
        ways_out = [
            asyncio.ensure_future(way)
            for way in (
                self._link.run(),
                self._worker.broken(),
                self._leave(),
                self._run_out_of_time(),
                self._heed_wishes(),
                self._traffic.run(),
                self._certificate.keep(),
                *([self._meter.run()] if self._settings.benchmark else []),
            )
        ]
        try:
            await asyncio.wait(ways_out, return_when=asyncio.FIRST_COMPLETED)
            for way in ways_out:
                if way.done():
                    way.result()
        finally:
            for way in ways_out:
                way.cancel()
            await asyncio.wait(ways_out)

    async def _heed_wishes(self) -> None:
        """Do what the machine's owner leaves word of; never returns."""
        state, heeded = self._settings.state_dir, None
        while True:
            wish = wishes.read(state)
            if wish is not None and wish != heeded:
                log.info("the owner's wish", wish=wish)
                if wish == "finish":
                    wishes.forget(state)
                    self.governor.finish()
                elif wish == "pause":
                    self.governor.pause()
                elif wish == "contribute":
                    self.governor.contribute()
                heeded = wish
            await self._clock.sleep(WISH_S)

    async def _leave(self) -> None:
        await self._leaving.wait()
        await self._worker.hands.idle()
        try:
            await within(self._clock, FAREWELL_S, self._say_goodbye())
        except TimeoutError:
            log.warning("leaving, though nobody has acknowledged the last results")

    async def _say_goodbye(self) -> None:
        await self._worker.hands.settled()
        await self._link.farewell()

    async def _run_out_of_time(self) -> None:
        await self._hurry.wait()
        await self._clock.sleep(HURRY_S)
        log.warning("leaving, though a task could not be ended and reported in time")

    # -------------------------------------------------------------- the link's handler

    def hello(self) -> Hello:
        """What the node registers with."""
        self._told = self._meter.machine()
        return Hello(
            machine=self._told,
            name=self._settings.name or socket.gethostname(),
            software=f"distribai/{distribai.__version__}",
            devices=[place.device for place in self._worker.places],
            tasks=self._worker.hands.told(),
            blobs=self._cache.newest(BLOBS_TOLD),
            intent=self.governor.intent,
            jobs=self._feedback.jobs(),
            intent_reason=self.governor.reason,
        )

    def heartbeat(self) -> pb.Heartbeat:
        """What the node says every few seconds."""
        now = self._meter.machine()
        news = now if worth_telling(self._told, now) else None
        self._told = news or self._told
        return pb.Heartbeat(
            machine=machine_to_wire(news),
            uptime_s=int(self._clock.monotonic() - self._started),
            tasks=convert.in_hand_to_wire(self._worker.hands.told()),
            bytes_up=self._link.bytes_up + self._traffic.up.total,
            bytes_down=self._link.bytes_down + self._traffic.down.total,
            intent=self.governor.intent.value,
            intent_reason=self.governor.reason,
            held_versions=self._worker.held_versions(),
        )

    def registered(self, ack: pb.RegisterAck) -> None:
        """The grid has taken the node."""
        try:
            remember(self._settings, self._join)
        except OSError as problem:
            log.warning("the grid's address cannot be kept", why=str(problem))
        self._contact.made()
        self._worker.registered(ack, self._link.unacked())

    def unreachable(self, why: str, hint: str) -> None:
        """The grid cannot be reached."""
        self._contact.lost(why, hint)

    def received(self, message: pb.OrchestratorMessage) -> None:
        """A numbered message."""
        body = message.WhichOneof("body")
        if body == "task_assign":
            self._worker.assign(message.task_assign)
        elif body == "task_result_ack":
            self._worker.acknowledged(message.task_result_ack)
        elif body == "round_complete":
            self._worker.round_complete(message.round_complete)
        elif body == "control":
            self._control(message.control)

    def _control(self, control: pb.ControlMessage) -> None:
        log.info("told by the grid", action=control.action, why=control.reason)
        if control.action == "cancel":
            self._worker.cancel(control.task_id, control.reason)
        elif control.action == "finish":
            self._worker.finish(control.task_id, control.within_s, control.reason)
        elif control.action in ("pause", "resume", "drain"):
            self.governor.obey(control.action)
        else:
            log.warning("unknown order; ignored", action=control.action)


def join_link(settings: NodeSettings) -> JoinLink:
    """The join link of the settings, or the one that the state directory remembers.

    Raises:
        UsageError: ``node.join``, there is none; ``node.link``, it is not well formed.
    """
    kept = settings.state_dir / JOIN_FILE
    if settings.join:
        return joinlink.parse(settings.join)
    if kept.is_file():
        try:
            return joinlink.parse(kept.read_text(encoding="utf-8", errors="replace"))
        except UsageError as problem:
            problem.hint = _kept_hint(settings)
            raise
    raise UsageError(
        "node.join",
        "This node has not joined a grid yet.",
        "Give it the link that `distribai orchestrator start` printed: --join LINK",
        field="join",
    )


def _kept_hint(settings: NodeSettings) -> str:
    """What to do when the link that was kept is no good: a node keeps the one it was taken with
    until it is given another."""
    return (
        f"This node used the link that it keeps in {settings.state_dir / JOIN_FILE}. Start it once "
        f"with a fresh one, which takes its place: distribai node start --state-dir "
        f'{settings.state_dir} --join "LINK". Key, cache and tasks in hand stay.'
    )


def remember(settings: NodeSettings, join: JoinLink) -> None:
    """Keep the link for the next start."""
    kept = settings.state_dir / JOIN_FILE
    text = f"{replace(join, invite='')}\n"
    if not kept.is_file() or kept.read_text() != text:
        durable.write(kept, text.encode(), point="node.join")
