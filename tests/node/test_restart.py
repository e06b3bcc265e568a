"""A daemon that ends at any moment and is started again on the same state directory; one whose disk
is full; one that was frozen; two with one key."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from distribai.core.tasks import WeightsRef
from distribai.errors import Conflict
from distribai.node.daemon import Daemon
from distribai.testing.clock import FakeClock, settle
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import (
    BlobServer,
    ScriptedOrchestrator,
    assignment,
    eventually,
    serving,
)
from tests.node.test_daemon import Grid

HAND = pb.TaskInHand(task_id="task_a", attempt=1)


@pytest.fixture
async def grid(tmp_path: Path) -> AsyncIterator[Grid]:
    async with ScriptedOrchestrator() as orchestrator, serving(BlobServer()) as server:
        made = Grid(orchestrator, server, tmp_path)
        yield made
        await made.stop()


def hands(grid: Grid) -> list[Path]:
    folder = grid.root / "state" / "hands"
    return sorted(folder.iterdir()) if folder.exists() else []


def files(folder: Path) -> dict[str, bytes]:
    """All but what it has counted, which is its own affair."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "traffic"
    }


# ------------------------------------------------------------------ restarts


async def test_a_task_at_work_is_taken_up_again_without_being_assigned_again(grid: Grid) -> None:
    await grid.up()
    assert (await grid.accepted(params={"do": "wait"})).accepted
    await grid.peer.hear("log")
    await grid.stop()
    daemon = grid.start()
    register = await grid.join(keep=[HAND])
    assert [(t.task_id, t.attempt, t.device) for t in register.tasks] == [("task_a", 1, 0)]
    daemon.finish(partial=True)
    result = await grid.peer.hear("task_result")
    assert (result.status, result.steps) == ("done", 1)
    grid.peer.acknowledge(result)
    assert grid.running is not None
    await grid.running
    assert hands(grid) == []
    assert list((grid.root / "state" / "work").iterdir()) == []


async def test_a_result_that_nobody_acknowledged_is_sent_again_and_not_trained_again(
    grid: Grid,
) -> None:
    await grid.up()
    await grid.accepted()
    first = await grid.peer.hear("task_result")
    await grid.stop()
    grid.server.requests.clear()
    daemon = grid.start()
    assert [t.task_id for t in (await grid.join(keep=[HAND])).tasks] == ["task_a"]
    again = await grid.peer.hear("task_result", "log")
    assert again == first  # the signature too
    assert grid.server.requests == []
    grid.peer.assign(assignment())  # the grid is not sure that it was delivered
    assert (await grid.peer.hear("task_accept")).accepted
    grid.peer.acknowledge(again)
    await eventually(lambda: not list(daemon._worker.hands))
    await eventually(lambda: hands(grid) == [])


async def test_what_the_grid_drops_is_gone_from_the_disk_too(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.stop()
    daemon = grid.start()
    await grid.join(drop=[HAND])
    await eventually(lambda: not list(daemon._worker.hands))
    await eventually(lambda: hands(grid) == [])
    assert (await grid.accepted(task_id="task_b")).accepted


async def test_a_record_that_cannot_be_read_is_named_and_the_daemon_lives(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.stop()
    (record,) = hands(grid)
    record.write_bytes(record.read_bytes()[:100])
    with capture_logs() as logs:
        grid.start()
        assert list((await grid.join()).tasks) == []
    assert [line["file"] for line in logs if line["log_level"] == "warning"] == [str(record)]
    assert (await grid.accepted()).accepted


async def test_a_task_for_a_device_that_is_gone_is_given_up(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    (hand,) = grid.daemon._worker.hands
    task = pb.TaskAssign.FromString(_record(hand))
    task.device = 5
    keeper = grid.daemon._worker._files.new(task)
    await keeper.keep("taken")
    await grid.stop()
    grid.start()
    assert list((await grid.join()).tasks) == []
    await eventually(lambda: hands(grid) == [])


def _record(hand: object) -> bytes:
    import base64

    return base64.b64decode(hand.keeper.record.assign)  # type: ignore[attr-defined]


async def test_an_upload_goes_on_at_the_offset_that_the_grid_has(grid: Grid) -> None:
    snapshot = grid.server.put(b"x" * 1_000_000)
    task = assignment(base=WeightsRef(5, "hash5", snapshot, 5))
    # Whatever comes after the cut is refused: the node cannot finish before it ends.
    grid.server.cut_upload, grid.server.after_cut = [600_000], [503] * 100_000
    await grid.up()
    grid.peer.assign(task)
    line = await grid.peer.hear("log")
    await eventually(lambda: grid.server.statuses)
    await grid.stop()
    grid.server.statuses = []
    (stands,) = [len(data) for _, data in grid.server.uploads.values()]
    assert stands == 600_000
    grid.server.requests.clear()
    grid.start()
    await grid.join(keep=[HAND])
    result = await grid.peer.hear("task_result", "log")  # no training: no line of a child
    assert result.status == "done", line
    methods = [(m, h.get("upload-offset")) for m, _, h in grid.server.requests]
    assert methods == [("HEAD", None), ("PATCH", str(stands))]
    assert grid.server.blobs[result.delta.sha256] == b"delta of " + b"x" * 1_000_000


# ------------------------------------------------------------------ full disks


@contextlib.contextmanager
def full(folder: Path) -> AsyncIterator[None]:  # type: ignore[misc]
    """Nothing can be written into ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in the way")
    yield
    folder.unlink()


async def test_a_task_that_cannot_be_kept_is_declined_until_there_is_room(grid: Grid) -> None:
    await grid.up()
    with full(grid.root / "state" / "hands"):  # type: ignore[attr-defined]
        answer = await grid.accepted()
        assert not answer.accepted
        assert "this machine's disk" in answer.reason
    assert (await grid.accepted()).accepted
    assert (await grid.peer.hear("task_result")).status == "done"


async def test_a_result_that_cannot_be_kept_is_sent_all_the_same(grid: Grid) -> None:
    daemon = await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    with full(grid.root / "state" / "hands"):  # type: ignore[attr-defined]
        grid.peer.say(control=pb.ControlMessage(action="finish", task_id="task_a", within_s=5.0))
        result = await grid.peer.hear("task_result")
        assert result.status == "done"
        grid.peer.acknowledge(result)
        await eventually(lambda: not list(daemon._worker.hands))
    assert (await grid.accepted(task_id="task_b")).accepted


async def test_a_cache_that_is_full_fails_the_attempt_until_there_is_room(grid: Grid) -> None:
    await grid.up()
    snapshot = grid.server.put(b"canonical")
    task = {"base": WeightsRef(5, "hash5", snapshot, 5)}
    with full(grid.root / "state" / "cache"):  # type: ignore[attr-defined]
        await grid.accepted(**task)
        result = await grid.peer.hear("task_result")
        assert (result.status, result.error_code) == ("failed", "io.file")
        grid.peer.acknowledge(result)
    (grid.root / "state" / "cache").mkdir()
    await grid.accepted(task_id="task_b", **task)
    assert (await grid.peer.hear("task_result")).status == "done"


async def test_an_address_that_cannot_be_kept_does_not_end_the_node(grid: Grid) -> None:
    (grid.root / "state" / "join.new").mkdir(parents=True)
    await grid.up()
    assert (await grid.accepted()).accepted


# ------------------------------------------------------------------ rounds that merge


async def test_a_task_is_told_of_its_round_and_hands_in_what_it_has(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    say = pb.ControlMessage(action="finish", task_id="task_z", within_s=5.0, reason="quorum")
    grid.peer.say(control=say)
    say.task_id = "task_a"
    say.within_s = 9.0
    grid.peer.say(control=say)
    result = await grid.peer.hear("task_result")
    assert (result.status, result.steps, result.text) == ("done", 1, "within 6.000")
    grid.peer.say(control=say)  # over already: nothing happens
    grid.peer.acknowledge(result)
    assert (await grid.accepted(task_id="task_b")).accepted  # the node goes on


async def test_a_time_that_makes_no_sense_means_now(grid: Grid) -> None:
    await grid.up()
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    say = pb.ControlMessage(action="finish", task_id="task_a", within_s=float("nan"))
    grid.peer.say(control=say)
    assert (await grid.peer.hear("task_result")).text == "within 0.000"


# ------------------------------------------------------------------ frozen, and two with one key


def thaw(clock: FakeClock, seconds: float) -> None:
    """Wake everybody whose time came in the last ``seconds``, all at the end of them."""
    clock._now += seconds
    for due, _, sleeper in clock._sleepers:
        if due <= clock._now and not sleeper.done():
            sleeper.set_result(None)


async def test_a_node_that_was_frozen_beyond_its_deadline_drops_the_task_and_takes_new_ones(
    grid: Grid,
) -> None:
    grid.peer.heartbeat_s = 10.0
    await grid.up()
    await grid.accepted(params={"do": "wait"}, deadline_s=1000.0)
    await grid.peer.hear("log")
    old = grid.peer.stream
    # All timers are due at once, as after a SIGCONT: the deadline, heartbeats, the silence.
    thaw(grid.clock, 5000.0)
    async with asyncio.timeout(60):
        register = await grid.join(drop=[HAND])  # the grid has leased it to somebody else
        await old.ended.wait()
    assert {t.task_id for t in register.tasks} <= {"task_a"}
    answer = await grid.accepted(task_id="task_b")
    assert answer.accepted
    results = [await grid.peer.hear("task_result")]
    while results[-1].task_id != "task_b":
        results.append(await grid.peer.hear("task_result"))
    assert results[-1].status == "done"
    # What it may have said about the old attempt is no result that could count.
    assert all(r.status == "failed" for r in results[:-1])


async def test_the_older_of_two_daemons_with_one_key_ends_and_touches_nothing(grid: Grid) -> None:
    older = await grid.up()
    running = grid.running
    await grid.accepted(params={"do": "wait"})
    await grid.peer.hear("log")
    await eventually(lambda: len(hands(grid)) == 1)
    first = grid.peer.stream
    state = grid.root / "state"
    shutil.copytree(state, grid.root / "copy")
    (grid.root / "copy" / "lock").unlink()
    newer = grid.start(state_dir=grid.root / "copy", join="")
    register = await grid.join(keep=[HAND])
    assert register.public_key == grid.peer.registered[0].public_key
    assert [t.task_id for t in register.tasks] == ["task_a"]
    before = files(state)
    while not first._in.empty():
        first._in.get_nowait()
    end = pb.SessionEnd(code="node.fenced", message="Another one has taken over.", hint="Stop one.")
    first.say(pb.OrchestratorMessage(session_end=end))
    assert running is not None
    with pytest.raises(Conflict) as caught:
        async with asyncio.timeout(60):
            await running
    assert (caught.value.code, caught.value.hint) == ("node.fenced", "Stop one.")
    assert older.hello().tasks
    after = files(state)
    assert b"node.fenced" in after.pop("contact")  # for `node status`
    assert after == before
    await settle()
    said = [first._in.get_nowait().WhichOneof("body") for _ in range(first._in.qsize())]
    assert "task_result" not in said
    grid.peer.say(control=pb.ControlMessage(action="finish", task_id="task_a", within_s=5.0))
    assert (await grid.peer.hear("task_result")).status == "done"
    assert isinstance(newer, Daemon)
