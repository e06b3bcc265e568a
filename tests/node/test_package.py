"""The package executor against a real child process without torch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distribai.core.child import Checkpoints, Gate, LogLine, Run
from distribai.core.devices import Device, Speed
from distribai.core.tasks import Assignment, KeptRef, Outcome, Progress, WeightsRef
from distribai.errors import DistribAIError, Unavailable, UsageError
from distribai.node import executors
from distribai.node.begun import Begun
from distribai.node.blobs import BlobClient
from distribai.node.cache import BlobCache
from distribai.node.child import LOG_LIMIT
from distribai.node.devices import Place
from distribai.node.executors import Services
from distribai.node.executors.package import CANCEL_S, READY_S, PackageExecutor
from distribai.node.feedback import FeedbackStore
from distribai.node.fetching import Fetcher
from distribai.node.keeping import HandFiles, Keeper
from distribai.testing.clock import FakeClock
from distribai.wire import convert
from tests.node.helpers import (
    FAKE_CHILD,
    BlobServer,
    NoJitter,
    assignment,
    eventually,
    ref_of,
    serving,
)

PLACE = Place(Device(0, "cpu", threads=3), "cpu")


class Bench:
    """An executor with all that it needs."""

    def __init__(self, root: Path, server: BlobServer) -> None:
        self.clock = FakeClock()
        self.server = server
        self.blobs = BlobClient(
            server.url, lambda: "t", self.clock, NoJitter(), attempts=2, trust_env=False
        )
        self.cache = BlobCache(root / "cache", 10**6)
        self.begun = Begun(root, self.cache)
        self.root = root
        self.wanted = Gate()
        self.checkpoints = Checkpoints()
        self.steps: list[Progress] = []
        self.lines: list[LogLine] = []
        self.made: list[Executor] = []
        self.files = HandFiles(root)
        self.feedback = FeedbackStore(root, 10**9)
        self.kept: list[Keeper] = []

    def executor(self, *arguments: str, command: tuple[str, ...] = ()) -> Executor:
        services = Services(
            self.cache,
            self.blobs,
            Fetcher(self.cache, self.blobs),
            self.begun,
            self.clock,
            self,
            self.root / "log",
            lambda: self.wanted,
            self.feedback,
            command or (sys.executable, str(FAKE_CHILD), *arguments),
            self.checkpoints,
        )
        self.made.append(Executor(services))
        self.made[-1].bench = self
        return self.made[-1]

    def keeper(self, task: Assignment) -> Keeper:
        self.kept.append(self.files.new(convert.assignment_to_wire(task, 0)))
        return self.kept[-1]

    def progress(self, progress: Progress) -> None:
        self.steps.append(progress)

    def log(self, task_id: str, line: LogLine) -> None:
        self.lines.append(line)

    async def close(self) -> None:
        for executor in self.made:
            await executor.close()
        await self.blobs.close()
        await self.files.close()


class Executor(PackageExecutor):
    """One that finds the keepers of its tasks in the bench."""

    bench: Bench

    async def do(self, task: Assignment) -> Outcome:
        return await self.run(task, PLACE, self.bench.keeper(task))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with serving(BlobServer()) as server:
        made = Bench(tmp_path, server)
        yield made
        await made.close()


async def do(executor: Executor, how: str, **changes: Any) -> Outcome:
    return await executor.do(assignment(params={"do": how}, **changes))


def pid(outcome: Outcome) -> str:
    return outcome.text.split()[0]


async def test_a_task_is_trained_and_its_delta_uploaded(bench: Bench) -> None:
    executor = bench.executor()
    assert (await executor.start()).devices == ("cpu",)
    snapshot = bench.server.put(b"canonical")
    outcome = await do(executor, "train", base=WeightsRef(3, "hash3", snapshot, 3))
    assert (outcome.status, outcome.steps, outcome.base_hash) == ("done", 2, "hash3")
    assert outcome.delta == ref_of(b"delta of canonical")
    assert bench.server.blobs[outcome.delta.sha256] == b"delta of canonical"
    assert outcome.text.endswith("device=cpu threads=3")
    assert [p.step for p in bench.steps] == [1, 2]
    assert [line.message for line in bench.lines] == ["trained"]
    assert executor.held_versions() == {"job_a": 3}
    assert {h["x-distribai-job"] for _, _, h in bench.server.requests} == {"job_a"}
    await executor.forget(["job_a"])
    assert executor.held_versions() == {}
    (folder,) = (bench.root / "work").iterdir()
    assert folder == bench.kept[0].folder


async def test_the_child_stays_warm_between_tasks(bench: Bench) -> None:
    executor = bench.executor()
    first = await do(executor, "train")
    assert pid(await do(executor, "train", task_id="task_b")) == pid(first)


async def test_two_tasks_never_run_at_once(bench: Bench) -> None:
    executor = bench.executor()
    outcomes = await asyncio.gather(*(do(executor, "train", task_id=f"task_{n}") for n in range(3)))
    assert [o.status for o in outcomes] == ["done"] * 3
    assert len({pid(o) for o in outcomes}) == 1


@pytest.mark.parametrize(
    ("how", "code", "why"),
    [
        ("kill", "node.memory", "killed, probably for memory"),
        ("alloc", "node.memory", "bad_alloc"),
        ("abort", "node.child", "signal 15"),
        ("exit", "node.child", "status 3. Its last words: boom: first line | boom: last line"),
        ("half", "node.child", "status 0"),
        ("hello, world", "node.child", "hello, world"),
        ('{"type": "done"}', "node.child", "makes no sense"),
        ('{"type": "run"}', "node.child", "makes no sense"),
        ('{"type":"cancel","task_id":"x","reason":"y"}', "node.child", "cancel message"),
        ('{"type":"ready","torch":"1","devices":[]}', "node.child", "ready message"),
        ("[" * 100_000, "node.child", "makes no sense"),
        ("other", "node.child", "done message that was not due"),
        ("twice", "node.child", "need message that was not due"),
    ],
)
async def test_a_child_that_fails_costs_the_attempt_and_the_next_task_gets_a_new_one(
    bench: Bench, how: str, code: str, why: str
) -> None:
    executor = bench.executor()
    before = await do(executor, "train")
    outcome = await do(executor, how, task_id="task_b", attempt=2)
    assert (outcome.task_id, outcome.attempt, outcome.status) == ("task_b", 2, "failed")
    assert outcome.error_code == code
    assert why in outcome.reason
    assert executor.held_versions() == {}
    after = await do(executor, "train", task_id="task_c")
    assert after.status == "done"
    assert pid(after) != pid(before)


async def test_a_child_that_dies_is_followed_by_one_that_goes_on_within_the_attempt(
    bench: Bench,
) -> None:
    executor = bench.executor()
    outcome = await do(executor, "stumble4")
    assert (outcome.status, outcome.reason) == ("done", "")
    assert executor._kept_steps == 3


async def test_a_child_that_dies_where_the_one_before_did_costs_the_attempt(bench: Bench) -> None:
    outcome = await do(bench.executor(), "stumble1")
    assert (outcome.status, outcome.error_code) == ("failed", "node.memory")


async def test_checkpoints_are_asked_for_as_the_services_say(bench: Bench) -> None:
    bench.checkpoints = Checkpoints(7.0, 0.1, 99)
    sent: list[Run] = []
    executor = bench.executor()
    await executor.start()
    child = executor._child
    assert child is not None
    real = child.send

    async def send(message: Any) -> None:
        sent.extend([message] if isinstance(message, Run) else [])
        await real(message)

    child.send = send  # type: ignore[method-assign]
    await do(executor, "train")
    assert (sent[0].checkpoints, sent[0].out_dir) == (bench.checkpoints, str(bench.kept[0].folder))


async def test_a_task_is_told_when_its_round_merges(bench: Bench) -> None:
    executor = bench.executor()
    task = assignment(params={"do": "wait"})
    keeper = bench.keeper(task)
    work = asyncio.ensure_future(executor.run(task, PLACE, keeper))
    await eventually(lambda: bench.lines)
    keeper.merges_at = bench.clock.monotonic() + 21.0
    await executor.finish(assignment(task_id="task_other"))
    await executor.finish(task)
    # A second for the report; nobody knows yet how long an upload takes here: a quarter.
    assert (await work).text == "within 15.000"
    executor._upload_s = 4.0
    work = asyncio.ensure_future(executor.run(task, PLACE, keeper))  # known before it begins
    assert (await work).text == "within 16.000"


async def test_a_delta_that_was_trained_already_is_only_uploaded(bench: Bench) -> None:
    executor = bench.executor()
    task = assignment(params={"do": "kill"})  # what would happen if it were trained
    keeper = bench.keeper(task)
    keeper.folder.mkdir(parents=True)
    (keeper.folder / "d").write_bytes(b"trained")
    outcome = Outcome(task.task_id, task.attempt, "done", ref_of(b"trained"), steps=2)
    await keeper.keep("trained", outcome=outcome, delta="d")
    done = await executor.run(task, PLACE, keeper)
    assert done == replace(outcome, metrics={"upload_seconds": 0.0})
    assert bench.server.blobs[ref_of(b"trained").sha256] == b"trained"


async def test_a_delta_that_was_torn_is_trained_again(bench: Bench) -> None:
    executor = bench.executor()
    task = assignment()
    keeper = bench.keeper(task)
    keeper.folder.mkdir(parents=True)
    (keeper.folder / "d").write_bytes(b"train")
    outcome = Outcome(task.task_id, task.attempt, "done", ref_of(b"trained"), steps=2)
    await keeper.keep("trained", outcome=outcome, delta="d")
    again = await executor.run(task, PLACE, keeper)
    assert again.delta == ref_of(b"delta of weights")


@pytest.mark.parametrize("size", [7, 40])
async def test_a_torn_delta_that_is_trained_again_to_other_bytes_is_uploaded_from_the_start(
    bench: Bench, size: int
) -> None:
    executor = bench.executor()
    task = assignment()
    keeper = bench.keeper(task)
    keeper.folder.mkdir(parents=True)
    (keeper.folder / "d").write_bytes(b"torn")
    before = bytes(range(size))
    bench.server.uploads["up_9"] = (
        {"sha256": ref_of(before).sha256, "size": size},
        bytearray(before[:-1]),
    )
    outcome = Outcome(task.task_id, task.attempt, "done", ref_of(before), steps=2)
    await keeper.keep("trained", outcome=outcome, delta="d", upload="up_9")
    again = await executor.run(task, PLACE, keeper)
    assert again.status == "done"
    assert again.delta is not None
    assert bench.server.blobs[again.delta.sha256] == b"delta of weights"
    assert keeper.record.outcome is not None
    assert keeper.record.outcome.delta == again.delta


async def test_a_disk_that_is_full_fails_the_attempt_until_there_is_room(bench: Bench) -> None:
    executor = bench.executor()
    await executor.start()
    (bench.root / "work").write_text("in the way")  # no directory can be made
    outcome = await do(executor, "train")
    assert (outcome.status, outcome.error_code) == ("failed", "io.file")
    (bench.root / "work").unlink()
    assert (await do(executor, "train", task_id="task_b")).status == "done"


async def test_a_line_without_end_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distribai.node.child.LINE_LIMIT", 10_000)
    outcome = await do(bench.executor(), "x" * 100_000)
    assert outcome.error_code == "node.child"
    assert "a line of more than 10000 bytes" in outcome.reason


async def test_a_child_that_closes_its_output_but_lives_is_ended(bench: Bench) -> None:
    executor = bench.executor()
    await executor.start()
    work = asyncio.ensure_future(do(executor, "mute"))
    await eventually(lambda: bench.clock.sleeping)
    await bench.clock.advance(5.0)
    outcome = await work
    assert outcome.error_code == "node.child"
    assert "closed its output" in outcome.reason


async def test_a_child_that_died_between_tasks_is_replaced(bench: Bench) -> None:
    executor = bench.executor()
    first = await do(executor, "train")
    os.kill(int(pid(first).removeprefix("pid=")), 9)
    await eventually(lambda: executor._child is not None and not executor._child.alive)
    assert (await do(executor, "train", task_id="task_b")).status == "done"


async def test_without_torch_the_hint_says_what_to_install(bench: Bench) -> None:
    with pytest.raises(UsageError) as caught:
        await bench.executor("no torch").start()
    assert caught.value.code == "node.torch"
    assert "pip install 'distribai[node]'" in caught.value.hint


async def test_a_program_that_is_not_there_is_an_error_not_a_crash(bench: Bench) -> None:
    with pytest.raises(Unavailable) as caught:
        await bench.executor(command=("/nonexistent/python",)).start()
    assert caught.value.code == "node.child"


async def test_a_child_that_never_gets_ready_is_given_up(bench: Bench) -> None:
    work = asyncio.ensure_future(bench.executor("silent").start())
    await eventually(lambda: bench.clock.sleeping)
    await bench.clock.advance(READY_S)
    with pytest.raises(Unavailable) as caught:
        await work
    assert "not ready within" in caught.value.message


async def test_a_child_that_talks_before_it_is_ready_is_ended(bench: Bench) -> None:
    with pytest.raises(DistribAIError) as caught:
        await bench.executor("eager").start()
    assert "log message before it was ready" in caught.value.message


async def test_a_start_that_is_not_wanted_any_more_leaves_no_process(bench: Bench) -> None:
    executor = bench.executor("silent")
    work = asyncio.ensure_future(executor.start())
    await eventually(lambda: bench.clock.sleeping)
    work.cancel()
    await asyncio.wait({work})
    assert work.cancelled()


async def test_a_blob_that_cannot_be_had_fails_the_attempt_with_the_true_reason(
    bench: Bench,
) -> None:
    executor = bench.executor()
    outcome = await do(executor, "train", base=WeightsRef(0, "h", ref_of(b"gone")))
    assert (outcome.status, outcome.error_code) == ("failed", "blob.unknown")
    assert (await do(executor, "train")).status == "done"


async def test_a_child_that_dies_while_its_blobs_are_fetched_is_noticed(bench: Bench) -> None:
    executor = bench.executor()
    snapshot = bench.server.put(b"canonical")
    bench.server.statuses = [503]
    bench.blobs._rng = _Long()
    await executor.start()
    work = asyncio.ensure_future(do(executor, "train", base=WeightsRef(0, "h", snapshot)))
    await eventually(lambda: bench.clock.sleeping)  # the download waits for its second try
    assert executor._child is not None
    os.kill(executor._child.pid, 9)
    assert (await work).error_code == "node.memory"


class _Long(NoJitter):
    def uniform(self, a: float, b: float) -> float:
        return 1000.0


async def test_a_delta_that_is_not_there_fails_the_attempt(bench: Bench) -> None:
    outcome = await do(bench.executor(), "no delta")
    assert (outcome.status, outcome.error_code) == ("failed", "io.file")


async def test_a_refused_upload_fails_the_attempt(bench: Bench) -> None:
    bench.server.statuses = [403]
    outcome = await do(bench.executor(), "train")
    assert (outcome.status, outcome.error_code) == ("failed", "auth.forbidden")


async def test_a_cancelled_task_ends_and_the_child_stays(bench: Bench) -> None:
    executor = bench.executor()
    first = await do(executor, "train")
    task = assignment(task_id="task_b", params={"do": "wait"})
    work = asyncio.ensure_future(executor.do(task))
    await eventually(lambda: len(bench.lines) == 2)
    assert not await executor.cancel(assignment(task_id="task_z"), "no such")
    assert await executor.cancel(task, "the job is cancelled")
    outcome = await work
    assert (outcome.error_code, outcome.reason) == ("task.failed", "the job is cancelled")
    assert not await executor.cancel(task, "again")
    assert pid(await do(executor, "train", task_id="task_c")) == pid(first)


async def test_a_child_that_ignores_a_cancel_is_ended(bench: Bench) -> None:
    executor = bench.executor()
    task = assignment(params={"do": "hang"})
    work = asyncio.ensure_future(executor.do(task))
    await eventually(lambda: bench.lines)
    await executor.cancel(task, "enough")
    await executor.cancel(task, "enough")
    await eventually(lambda: bench.clock.sleeping)
    await bench.clock.advance(CANCEL_S)
    outcome = await work
    assert outcome.error_code == "node.child"
    assert "did not drop its task" in outcome.reason


async def test_work_that_is_abandoned_ends_its_child(bench: Bench) -> None:
    executor = bench.executor()
    work = asyncio.ensure_future(do(executor, "hang"))
    await eventually(lambda: bench.lines)
    child = executor._child
    assert child is not None
    work.cancel()
    await asyncio.wait({work})
    assert work.cancelled()
    assert not child.alive


async def test_the_child_hears_the_governor_before_and_during_a_task(bench: Bench) -> None:
    bench.wanted = Gate(share=0.5, pause=True)
    executor = bench.executor()
    work = asyncio.ensure_future(do(executor, "wait"))
    await eventually(lambda: bench.lines)
    await executor.gate(Gate(share=0.5))
    await executor.gate(Gate(share=0.5, finish=True))
    outcome = await work
    assert outcome.text == "0.5 True False; 0.5 False False; 0.5 False True"


async def test_a_child_that_does_not_end_when_asked_is_ended(bench: Bench) -> None:
    executor = bench.executor(command=("sh", "-c", f"{_ready_line()}; exec sleep 600"))
    await executor.start()
    closing = asyncio.ensure_future(executor.close())
    await eventually(lambda: bench.clock.sleeping)
    await bench.clock.advance(5.0)
    await closing


def _ready_line() -> str:
    return """printf '{"type":"ready","torch":"2","devices":["cpu"]}\\n'"""


async def test_the_log_of_children_does_not_grow_for_ever(bench: Bench) -> None:
    log = bench.root / "log" / "training.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * (LOG_LIMIT + 1))
    await bench.executor().start()
    assert log.stat().st_size == 0
    assert log.with_suffix(".old").exists()


def test_the_executors_are_found_by_a_scan() -> None:
    assert set(executors.find()) == {"package"}


async def test_a_device_is_measured_between_two_tasks(bench: Bench) -> None:
    executor = bench.executor()
    assert await executor.measure(PLACE) == Speed(PLACE.device.index, 50.0, 10.0)
    assert (await do(executor, "train")).status == "done"
    cold = bench.executor("unmeasurable")
    with pytest.raises(Unavailable, match="too warm"):
        await cold.measure(PLACE)
    assert (await do(cold, "train")).status == "done", "the child lives on"


async def test_weights_that_a_child_has_made_go_into_the_cache_and_the_next_one_hears_of_them(
    bench: Bench,
) -> None:
    executor = bench.executor()
    whole = ref_of(b"whole weights")
    base = WeightsRef(3, "hash3", bench.server.put(b"canonical"), 3, kept=KeptRef(2, whole))
    outcome = await do(executor, "keep", base=base)
    assert (outcome.status, outcome.text) == ("done", f"here=0 room={10**6}")
    path = bench.cache.find(whole)
    assert path is not None
    assert path.read_bytes() == b"whole weights"
    outcome = await do(executor, "keep", base=base)
    assert outcome.text == f"here=1 room={10**6 - whole.size}"


async def test_weights_that_are_torn_on_their_way_to_the_cache_cost_nothing(bench: Bench) -> None:
    outcome = await do(bench.executor(), "keep torn")
    assert outcome.status == "done"
    assert bench.cache.find(ref_of(b"whole weights")) is None


async def test_a_snapshot_that_was_begun_is_gone_on_with_or_found_to_be_gone(bench: Bench) -> None:
    executor = bench.executor()
    earlier, other = bench.server.put(b"weights of version 3"), ref_of(b"weights of version 4")
    base = WeightsRef(5, "hash5", bench.server.put(b"canonical"), 5)
    bench.begun.begin("job_a", KeptRef(3, earlier))
    assert bench.begun.of("job_a") == (), "nothing of it is here"
    bench.cache.partial(earlier).write_bytes(b"weights")
    outcome = await do(executor, "begun", base=base)
    assert outcome.text == "begun=1 here=7 gone=0"
    assert bench.server.requests[-1][2]["range"] == "bytes=7-"
    assert Begun(bench.root, bench.cache).of("job_a") == (KeptRef(3, earlier),)

    bench.begun.begin("job_a", KeptRef(4, other))
    bench.cache.partial(other).write_bytes(b"weights")
    assert (await do(executor, "begun", base=base)).text == "begun=1 here=7 gone=1"
    assert bench.begun.of("job_a") == ()
    assert not bench.cache.partial(other).exists()
    assert Begun(bench.root, bench.cache).of("job_a") == ()
