"""The whole daemon: a real gRPC stream, real HTTP, a real child process without torch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distribai import wishes
from distribai.core import contact
from distribai.core.plain import from_plain
from distribai.core.sealed import unseal
from distribai.core.tasks import UpdateRef, WeightsRef
from distribai.errors import Conflict, NotAllowed, UsageError
from distribai.node.benchmark import LOOK_S
from distribai.node.daemon import FAREWELL_S, HURRY_S, WISH_S, Daemon, join_link, remember
from distribai.node.transport import Transport
from distribai.sections import NodeSettings
from distribai.testing.clock import FakeClock, settle
from distribai.testing.link import MemoryConnection, MemoryTransport
from distribai.testing.proxy import Proxy
from distribai.wire import convert, signing
from distribai.wire.joinlink import JoinLink
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import (
    FAKE_CHILD,
    GRID,
    BlobServer,
    NoJitter,
    Peer,
    ScriptedOrchestrator,
    assignment,
    eventually,
    ref_of,
    serving,
)


class Grid:
    """An orchestrator, a blob server, and a daemon that joins them."""

    def __init__(self, orchestrator: ScriptedOrchestrator, server: BlobServer, root: Path) -> None:
        self.orchestrator, self.server, self.root = orchestrator, server, root
        self.peer = Peer(heartbeat_s=1e6)  # advancing the clock makes no silence
        self.clock = FakeClock()
        self.port = orchestrator.port
        self.transport: Transport | None = None
        self.running: asyncio.Task[None] | None = None
        self.command: tuple[str, ...] = (sys.executable, str(FAKE_CHILD))

    def start(self, **changes: Any) -> Daemon:
        http = self.server.url.removeprefix("http://")
        join = JoinLink("h", f"127.0.0.1:{self.port}", http, GRID, "inv_1")
        settings = NodeSettings(
            state_dir=self.root / "state", join=str(join), name="box", benchmark=False
        )
        self.daemon = Daemon(
            replace(settings, **changes),
            clock=self.clock,
            rng=NoJitter(),
            transport=self.transport,
            command=self.command,
        )
        self.running = asyncio.ensure_future(self.daemon.run())
        return self.daemon

    async def join(self, *, resume: bool = False, **ack: Any) -> pb.RegisterSession:
        stream = await self.orchestrator.accept()
        return await self.peer.welcome(stream, resume=resume, **ack)

    async def up(self, **changes: Any) -> Daemon:
        daemon = self.start(**changes)
        await self.join()
        return daemon

    async def accepted(self, **task: Any) -> pb.TaskAccept:
        self.peer.assign(assignment(**task))
        return await self.peer.hear("task_accept")

    async def stop(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait({self.running})


@pytest.fixture
async def grid(tmp_path: Path) -> AsyncIterator[Grid]:
    async with ScriptedOrchestrator() as orchestrator, serving(BlobServer()) as server:
        made = Grid(orchestrator, server, tmp_path)
        yield made
        await made.stop()


async def test_a_task_goes_all_the_way(grid: Grid) -> None:
    daemon = grid.start(threads=2)
    register = await grid.join()
    assert register.name == "box"
    assert register.software.startswith("distribai/")
    assert (register.devices[0].type, register.devices[0].threads) == ("cpu", 2)
    assert register.intent == "contribute"
    snapshot = grid.server.put(b"canonical")
    task = assignment(base=WeightsRef(5, "hash5", snapshot, 5))
    grid.peer.assign(task)
    assert (await grid.peer.hear("task_accept")).accepted
    assert (await grid.peer.hear("task_progress")).step == 1
    result = await grid.peer.hear("task_result")
    outcome, signature = convert.outcome_from_wire(result)
    signing.verify_outcome(register.public_key, signature, outcome)
    assert outcome.status == "done"
    assert outcome.delta is not None
    assert grid.server.blobs[outcome.delta.sha256] == b"delta of canonical"
    assert grid.server.requests[0][2]["authorization"] == "Bearer token-1"
    daemon.governor.contribute()  # a heartbeat at once
    beat = await grid.peer.hear("heartbeat")
    assert [t.task_id for t in beat.tasks] == ["task_a"]
    assert dict(beat.held_versions) == {"job_a": 5}
    assert beat.bytes_up > len(b"delta of canonical")
    grid.peer.acknowledge(result)
    await eventually(lambda: not list(daemon._worker.hands))


async def test_a_machine_whose_blobs_do_not_come_says_why_and_that_they_come_again(
    grid: Grid,
) -> None:
    await grid.up()
    base = grid.server.put(b"weights of version 5")
    grid.server.statuses = [502] * 40
    grid.peer.assign(assignment(base=WeightsRef(5, "hash5", base, 5)))
    async with asyncio.timeout(180):
        while not (beat := await grid.peer.hear("heartbeat")).machine.trouble:
            pass
        assert grid.server.url in beat.machine.trouble
        grid.server.statuses.clear()
        while not beat.HasField("machine") or beat.machine.trouble:
            beat = await grid.peer.hear("heartbeat")


async def test_a_machine_whose_month_is_used_up_says_so_and_takes_no_tasks(grid: Grid) -> None:
    daemon = await grid.up(month_bytes=100_000)
    large = grid.server.put(bytes(200_000))
    grid.peer.assign(assignment(base=WeightsRef(5, "hash5", large, 5)))
    result = await grid.peer.hear("task_result")
    assert (result.status, result.error_code) == ("failed", "node.month")
    assert "200 kB more do not fit" in result.reason
    assert not any(method == "GET" for method, _, _ in grid.server.requests)
    daemon.governor.contribute()  # a heartbeat at once
    beat = await grid.peer.hear("heartbeat")
    assert beat.intent == "pause"
    assert "its owner gives" in beat.intent_reason
    grid.peer.acknowledge(result)
    answer = await grid.accepted(task_id="task_b")
    assert not answer.accepted
    assert "its owner gives" in answer.reason
    await grid.stop()
    grid.start(month_bytes=10**9)
    register = await grid.join()
    assert (register.intent, register.intent_reason) == ("contribute", "")
    assert register.machine.month_bytes == 10**9


async def test_a_result_survives_a_reset_connection_until_it_is_acknowledged(grid: Grid) -> None:
    async with Proxy("127.0.0.1", grid.port) as proxy:
        grid.port = proxy.port
        daemon = await grid.up()
        assert (await grid.accepted()).accepted
        await grid.peer.hear("task_result")
        proxy.reset()
        register = await grid.join()  # an orchestrator that has forgotten everything
        assert [(t.task_id, t.attempt) for t in register.tasks] == [("task_a", 1)]
        result = await grid.peer.hear("task_result")
        assert result.status == "done"
        assert register.blobs == []
        grid.peer.acknowledge(result)
        await eventually(lambda: not list(daemon._worker.hands))
        await grid.stop()


async def test_a_result_that_was_received_but_not_counted_is_told_to_a_new_session(
    grid: Grid,
) -> None:
    await grid.up()
    await grid.accepted()
    first = await grid.peer.hear("task_result")
    grid.peer.say(control=pb.ControlMessage(action="resume"))  # acknowledges its number
    await grid.peer.hear("heartbeat")
    grid.peer.stream.say(None)
    await grid.join(keep=[pb.TaskInHand(task_id="task_a", attempt=1)])
    assert await grid.peer.hear("task_result") == first


async def test_a_running_task_survives_a_reconnect_and_is_presented(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    grid.peer.stream.say(None)
    register = await grid.join(resume=True)
    assert [t.task_id for t in register.tasks] == ["task_a"]
    daemon.finish(partial=True)
    result = await grid.peer.hear("task_result")
    assert result.text.endswith("True")


async def test_a_task_that_is_not_ours_any_more_is_dropped_without_a_result(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    grid.peer.stream.say(None)
    await grid.join(
        drop=[
            pb.TaskInHand(task_id="task_a", attempt=1),
            pb.TaskInHand(task_id="task_unknown", attempt=1),
        ]
    )
    await eventually(lambda: not list(daemon._worker.hands))
    assert (await grid.accepted(task_id="task_b")).accepted
    assert (await grid.peer.hear("task_result")).task_id == "task_b"


async def test_a_cancelled_task_makes_room_at_once(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    grid.peer.say(control=pb.ControlMessage(action="cancel", task_id="task_a"))
    assert (await grid.accepted(task_id="task_b")).accepted
    assert (await grid.peer.hear("task_result")).task_id == "task_b"


async def test_a_newer_attempt_replaces_the_older_one(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    assert (await grid.accepted(attempt=2)).accepted
    assert (await grid.peer.hear("task_result")).attempt == 2


async def test_the_same_assignment_twice_is_one_task(grid: Grid) -> None:
    daemon = await grid.up()
    assert (await grid.accepted(params={"do": "wait"})).accepted
    assert (await grid.accepted(params={"do": "wait"})).accepted
    assert len(list(daemon._worker.hands)) == 1


async def test_a_cancelled_result_is_owed_no_more(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted()
    await grid.peer.hear("task_result")
    grid.peer.say(control=pb.ControlMessage(action="cancel", task_id="task_a"))
    await eventually(lambda: not list(daemon._worker.hands))


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"executor": "script"}, "no executor 'script'"),
        ({"isolation": "L3"}, "isolation 'L3'"),
        ({"task_id": "task_b"}, "busy"),
    ],
)
async def test_a_task_that_the_node_cannot_do_is_declined_with_the_reason(
    grid: Grid, task: dict[str, Any], why: str
) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    answer = await grid.accepted(**{"task_id": "task_c", **task})
    assert not answer.accepted
    assert why in answer.reason


async def test_a_device_that_is_not_there_is_declined(grid: Grid) -> None:
    await grid.up()
    grid.peer.assign(assignment(), device=7)
    assert "no device 7" in (await grid.peer.hear("task_accept")).reason


async def test_a_malformed_task_is_declined_and_the_daemon_lives(grid: Grid) -> None:
    await grid.up()
    grid.peer.say(task_assign=pb.TaskAssign(task_id="task_a", attempt=1))
    assert "malformed" in (await grid.peer.hear("task_accept")).reason
    grid.peer.say(round_complete=pb.DiLoCoRoundComplete(job_id="job_a"))
    grid.peer.say(control=pb.ControlMessage(action="explode"))
    assert (await grid.accepted()).accepted


async def test_a_paused_node_declines_until_it_is_resumed(grid: Grid) -> None:
    await grid.up()
    grid.peer.say(control=pb.ControlMessage(action="pause"))
    assert (await grid.peer.hear("heartbeat")).intent == "pause"
    assert "intent is pause" in (await grid.accepted()).reason
    grid.peer.say(control=pb.ControlMessage(action="resume"))
    assert (await grid.accepted(task_id="task_b")).accepted


async def test_a_killed_child_is_a_failed_attempt_and_the_daemon_lives(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "kill"})
    result = await grid.peer.hear("task_result")
    assert (result.status, result.error_code) == ("failed", "node.memory")
    grid.peer.acknowledge(result)
    await grid.accepted(task_id="task_b")
    assert (await grid.peer.hear("task_result")).status == "done"


async def test_a_task_beyond_its_deadline_fails_and_makes_room(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"}, deadline_s=1000.0)
    await grid.peer.hear("log")
    advancing = asyncio.ensure_future(grid.clock.advance(1000.0))
    result = await grid.peer.hear("task_result")
    assert (result.status, result.error_code) == ("failed", "task.timeout")
    await advancing


async def test_a_result_that_is_too_large_to_send_is_a_failed_attempt(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "large"})
    result = await grid.peer.hear("task_result")
    assert (result.status, result.error_code) == ("failed", "task.failed")


async def test_progress_is_not_told_more_often_than_agreed_but_the_end_always(grid: Grid) -> None:
    await grid.up(progress_s=2.0)
    await grid.accepted(steps=50)
    steps = []
    while not steps or steps[-1] < 50:
        steps.append((await grid.peer.hear("task_progress")).step)
    assert steps == [1, 50]


async def test_the_update_of_a_warm_job_is_fetched_ahead(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted(base=WeightsRef(1, "hash1"))
    await grid.peer.hear("task_result")
    old, new = grid.server.put(b"update 1"), grid.server.put(b"update 2")
    weights = WeightsRef(
        2, "hash2", updates=(UpdateRef(1, old, "hash1"), UpdateRef(2, new, "hash2"))
    )
    done = pb.DiLoCoRoundComplete(
        job_id="job_a", version=2, weights=convert.weights_to_wire(weights)
    )
    grid.peer.say(round_complete=done)
    await eventually(lambda: daemon._cache.newest(9) == [new.sha256])
    done.job_id = "job_cold"
    grid.peer.say(round_complete=done)
    lost = ref_of(b"lost")
    done.job_id = "job_a"
    done.weights.updates[1].blob.sha256 = lost.sha256
    grid.peer.say(round_complete=done)
    later = grid.server.put(b"update 3")
    done.weights.updates[1].blob.sha256 = later.sha256
    daemon.governor.spare("the month is used up")
    grid.peer.say(round_complete=done)
    grid.peer.say(round_complete=pb.DiLoCoRoundComplete(job_id="job_a", job_done=True))
    await eventually(lambda: daemon._worker.held_versions() == {})
    assert not any(later.sha256 in path for _, path, _ in grid.server.requests)
    assert daemon._cache.newest(9) == [new.sha256]
    grid.peer.stream.say(None)
    assert (await grid.join()).blobs == [new.sha256]


async def test_a_snapshot_whose_task_was_taken_back_is_fetched_to_its_end_and_then_the_updates(
    grid: Grid,
) -> None:
    daemon = await grid.up()
    begun, newer = grid.server.put(bytes(5000)), grid.server.put(bytes(6000))
    update = grid.server.put(b"update 6")
    grid.server.stall_download = [1000]
    await grid.accepted(base=WeightsRef(5, "hash5", begun, 5))
    await eventually(lambda: daemon._traffic.down.total == 1000)
    weights = WeightsRef(6, "hash6", newer, 6, (UpdateRef(6, update, "hash6"),))
    grid.peer.say(
        round_complete=pb.DiLoCoRoundComplete(
            job_id="job_a", version=6, weights=convert.weights_to_wire(weights)
        )
    )
    await settle()
    assert [(p[-64:], h.get("range")) for _, p, h in grid.server.requests] == [
        (begun.sha256, None)
    ], "the task fetches it itself"
    grid.peer.say(control=pb.ControlMessage(action="cancel", task_id="task_a"))
    await eventually(lambda: daemon._cache.newest(9) == [update.sha256, begun.sha256])
    assert [(path[-64:], h.get("range")) for _, path, h in grid.server.requests] == [
        (begun.sha256, None),
        (begun.sha256, "bytes=1000-"),
        (update.sha256, None),
    ]


async def test_leaving_finishes_the_step_reports_and_waits_for_the_acknowledgement(
    grid: Grid,
) -> None:
    daemon = await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    daemon.finish(partial=True)
    result = await grid.peer.hear("task_result")
    assert (result.status, result.steps) == ("done", 1)
    assert grid.running is not None
    assert not grid.running.done()
    grid.peer.acknowledge(result)
    await grid.running
    async with asyncio.timeout(30):
        await grid.peer.stream.ended.wait()


async def test_an_idle_node_says_that_it_leaves(grid: Grid) -> None:
    daemon = await grid.up()
    await eventually((grid.root / "state" / "join").exists)
    await settle()
    daemon.finish()
    beats = [await grid.peer.hear("heartbeat")]
    while beats[-1].intent != "drain":
        beats.append(await grid.peer.hear("heartbeat"))
    assert list(beats[-1].tasks) == []
    assert grid.running is not None
    await grid.running


async def test_a_drain_by_the_grid_lets_the_task_end_by_itself(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    grid.peer.say(control=pb.ControlMessage(action="drain"))
    assert (await grid.peer.hear("heartbeat")).intent == "drain"
    assert "intent is drain" in (await grid.accepted(task_id="task_b")).reason
    assert grid.running is not None
    assert not grid.running.done()


async def test_leaving_does_not_wait_for_ever_for_an_acknowledgement(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted()
    await grid.peer.hear("task_result")
    daemon.finish()
    await grid.peer.hear("heartbeat")
    await settle()
    await grid.clock.advance(FAREWELL_S)
    assert grid.running is not None
    await grid.running


async def test_leaving_in_a_hurry_gives_a_task_that_hangs_up(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted(params={"do": "hang"})
    await grid.peer.hear("log")
    daemon.finish(partial=True)
    await grid.peer.hear("heartbeat")
    await settle()
    await grid.clock.advance(HURRY_S)
    assert grid.running is not None
    await grid.running


async def test_a_fenced_node_ends_with_that_error_and_leaves_no_child(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted(params={"do": "hang"})
    await grid.peer.hear("log")
    child = daemon._worker._executors["package"]._child  # type: ignore[attr-defined]
    end = pb.SessionEnd(code="node.fenced", message="Another session has taken over.")
    grid.peer.say(session_end=end)
    assert grid.running is not None
    with pytest.raises(Conflict) as caught:
        await grid.running
    assert caught.value.code == "node.fenced"
    assert not child.alive


async def test_a_refused_invite_ends_the_daemon_and_nothing_is_remembered(grid: Grid) -> None:
    grid.start()
    await grid.peer.challenge(await grid.orchestrator.accept())
    end = pb.SessionEnd(code="node.invite", message="Used up.", hint="Ask for another.")
    grid.peer.say(session_end=end)
    assert grid.running is not None
    with pytest.raises(NotAllowed) as caught:
        await grid.running
    assert (caught.value.code, caught.value.hint) == ("node.invite", "Ask for another.")
    assert not (grid.root / "state" / "join").exists()


async def test_a_kept_link_that_the_grid_refuses_says_where_it_is_and_how_to_replace_it(
    grid: Grid,
) -> None:
    await grid.up()
    kept = grid.root / "state" / "join"
    await eventually(kept.exists)
    await grid.stop()
    grid.start(join="")
    await grid.peer.challenge(await grid.orchestrator.accept())
    grid.peer.say(session_end=pb.SessionEnd(code="node.invite", message="New.", hint="Ask."))
    assert grid.running is not None
    with pytest.raises(NotAllowed) as caught:
        await grid.running
    assert caught.value.hint.startswith(f"Ask. This node used the link that it keeps in {kept}.")
    assert "--join" in caught.value.hint


async def test_a_second_daemon_in_the_same_state_directory_is_refused(grid: Grid) -> None:
    await grid.up()
    first = grid.running
    grid.start()
    assert grid.running is not None
    with pytest.raises(Conflict) as caught:
        await grid.running
    assert caught.value.code == "node.locked"
    grid.running = first


async def test_a_node_remembers_its_key_and_its_grid_but_not_the_invite(grid: Grid) -> None:
    await grid.up()
    key = grid.peer.registered[0].public_key
    await eventually((grid.root / "state" / "join").exists)
    await grid.stop()
    assert "inv_1" not in (grid.root / "state" / "join").read_text()
    grid.start(join="")
    register = await grid.join()
    assert (register.public_key, register.invite) == (key, "")


class Counted(MemoryTransport):
    """A transport in memory that counts how often it was asked."""

    tries = 0

    async def connect(self) -> MemoryConnection:
        self.tries += 1
        return await super().connect()


async def test_what_stands_between_node_and_grid_lies_on_disk_as_long_as_it_does(
    grid: Grid,
) -> None:
    kept = grid.root / "state" / contact.FILE

    def trouble() -> contact.Trouble:
        found = from_plain(contact.Trouble, unseal(kept.read_bytes()))
        assert isinstance(found, contact.Trouble)
        return found

    async def next_tries() -> None:
        await eventually(lambda: transport.tries > 0)  # its child is up, with the clock at rest
        before = transport.tries
        while transport.tries < before + 2:
            await grid.clock.advance(1.0)
            await settle()

    grid.transport = transport = Counted()
    transport.refuse = True
    grid.start()
    await next_tries()
    await next_tries()
    assert (trouble().why, trouble().code) == ("refused", "")
    assert "join link" in trouble().hint
    transport.refuse, before = False, transport.tries
    while transport.tries == before:
        await grid.clock.advance(1.0)
        await settle()
    stream = await transport.accept()
    await grid.peer.welcome(stream)
    await eventually(lambda: not kept.exists())
    end = pb.SessionEnd(code="node.banned", message="Out.", hint="Ask.", retry=False)
    stream.say(pb.OrchestratorMessage(session_end=end))
    assert grid.running is not None
    with pytest.raises(NotAllowed):
        await grid.running
    assert (trouble().why, trouble().hint, trouble().code) == ("Out.", "Ask.", "node.banned")
    grid.start()
    await grid.peer.welcome(await transport.accept())
    await eventually(lambda: not kept.exists())


async def test_a_defect_ends_the_daemon_instead_of_leaving_it_deaf(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await grid.up()
    monkeypatch.setattr(daemon._worker, "_sign", lambda _: 1 / 0)
    await grid.accepted()
    assert grid.running is not None
    with pytest.raises(ZeroDivisionError):
        await grid.running


def test_a_node_without_a_grid_is_told_how_to_join(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        join_link(NodeSettings(state_dir=tmp_path))
    assert caught.value.code == "node.join"


def test_a_damaged_memory_of_the_link_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "join").write_bytes(b"distribai://h/?grpc=\xff\xfe")
    with pytest.raises(UsageError) as caught:
        join_link(NodeSettings(state_dir=tmp_path))
    assert caught.value.code == "node.link"
    assert str(tmp_path / "join") in caught.value.hint
    assert "--join" in caught.value.hint


def test_a_link_is_remembered_once(tmp_path: Path) -> None:
    settings = NodeSettings(state_dir=tmp_path)
    link = JoinLink("h", "a:1", "b:2", "g", "secret")
    remember(settings, link)
    remember(settings, link)
    assert join_link(settings) == replace(link, invite="")


async def test_the_owner_s_wishes_reach_a_running_daemon(grid: Grid) -> None:
    daemon = await grid.up()
    state = grid.root / "state"
    wishes.leave(state, "pause")
    await grid.clock.advance(WISH_S)
    assert daemon.governor.intent == "pause"
    wishes.leave(state, "contribute")
    await grid.clock.advance(WISH_S)
    assert daemon.governor.intent == "contribute"
    (state / wishes.FILE).write_bytes(b"\xff")
    await grid.clock.advance(WISH_S)
    assert daemon.governor.intent == "contribute", "what makes no sense is no wish"
    wishes.leave(state, "finish")
    await grid.clock.advance(WISH_S)
    assert daemon.governor.intent == "drain"
    assert wishes.read(state) is None, "started again it is welcome"


async def test_a_pause_outlives_a_restart_and_a_finish_does_not(grid: Grid) -> None:
    state = grid.root / "state"
    for wish, intent in (("finish", "contribute"), ("pause", "pause")):
        state.mkdir(exist_ok=True)
        wishes.leave(state, wish)  # type: ignore[arg-type]
        daemon = grid.start()
        await grid.join()
        await eventually(lambda d=daemon, i=intent: d.governor.intent == i)
        await grid.stop()


async def test_a_node_tells_what_was_measured_and_when_it_was(grid: Grid) -> None:
    daemon = grid.start(benchmark=True)
    register = await grid.join()
    assert register.machine.memory_mb > 0
    assert register.machine.isolation == "L0"
    if not register.machine.speeds:
        # The machine that runs the tests is seldom quiet: the meter loses patience.
        while not daemon._meter.machine().speeds:
            await grid.clock.advance(LOOK_S)
            await asyncio.sleep(0.01)
        beat = await grid.peer.hear("heartbeat")
        while not beat.machine.speeds:
            beat = await grid.peer.hear("heartbeat")
        assert beat.machine.speeds[0].gflops == 50.0
