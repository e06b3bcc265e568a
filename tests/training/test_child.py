from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distribai.core import child as wire
from distribai.core.ranges import SampleRange
from distribai.core.tasks import Assignment
from distribai.training import child, desk
from distribai.training.loop import OutOfMemory

from .daemon import B, Daemon, Grid, H, make_spec


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    return Grid(tmp_path, make_spec())


@pytest.fixture
def daemon(grid: Grid) -> Iterator[Daemon]:
    """A child in a thread of this process, at the other end of two pipes."""
    yield from serve(grid)


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Daemon]:
    yield from serve(Grid(tmp_path, make_spec(moments="keep")))


def serve(grid: Grid) -> Iterator[Daemon]:
    down, up = os.pipe(), os.pipe()
    child_in, child_out = os.fdopen(down[0], "rb"), os.fdopen(up[1], "wb")
    thread = threading.Thread(target=child.main, args=(child_in, child_out))
    thread.start()
    to_child, from_child = os.fdopen(down[1], "wb"), os.fdopen(up[0], "rb")
    daemon = Daemon(grid, to_child, from_child)
    assert isinstance(daemon.read(), wire.Ready)
    yield daemon
    to_child.close()
    thread.join(60)
    assert not thread.is_alive()
    for file in (child_in, child_out, from_child):
        file.close()


def test_a_child_process_keeps_step_with_the_merge_for_two_rounds(grid: Grid) -> None:
    command = "import sys; from distribai.training.child import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        daemon = Daemon(grid, process.stdin, process.stdout)
        ready = daemon.read()
        assert isinstance(ready, wire.Ready)
        assert ready.devices[-1] == "cpu"
        losses = []
        for number in range(2):
            done = []
            for node in range(2):
                start = (2 * number + node) * H * B
                done.append(daemon.run(grid.task(f"{number}{node}", start=start)))
                assert done[-1].outcome.status == "done"
                assert done[-1].outcome.base_hash == grid.hash
                assert done[-1].outcome.samples == (SampleRange(start, start + H * B),)
                assert done[-1].outcome.tokens == H * B * 8
            grid.merge(done)
            check = daemon.run(grid.task(f"check{number}", "evaluate", params={"batches": 3}))
            assert check.outcome.base_hash == grid.hash
            losses.append(check.outcome.metrics["held_out_loss"])
        assert losses[1] < losses[0] < 6
        assert [m for m in daemon.lines if isinstance(m, wire.LogLine)] == []
        process.stdin.close()
        assert process.wait(60) == 0
    # Warm: the data came once, each update once, nothing else.
    data = {grid.data.manifest.sha256, *(s.blob.sha256 for s in grid.dataset.shards)}
    assert sorted(daemon.needed) == sorted({*data, *(u.blob.sha256 for u in grid.updates)})


def test_a_childs_process_says_so_when_a_line_is_unreadable() -> None:
    command = "import sys; from distribai.training.child import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command], input=b"hello\n", capture_output=True, timeout=120
    )
    assert done.returncode == 2
    assert b"unreadable line" in done.stderr
    assert isinstance(wire.decode(done.stdout), wire.Ready)


def test_the_same_task_trains_to_the_same_bytes(grid: Grid, daemon: Daemon) -> None:
    first, again = daemon.run(grid.task("a")), daemon.run(grid.task("a"))
    assert first.outcome.delta == again.outcome.delta
    assert first.outcome.metrics["loss_first"] == again.outcome.metrics["loss_first"]


def test_a_newcomer_gets_to_the_version_from_the_seed_or_a_snapshot(
    grid: Grid, daemon: Daemon
) -> None:
    grid.merge([daemon.run(grid.task("a"))])
    grid.merge([daemon.run(grid.task("b", start=100))])
    tasks = [
        replace(grid.task("seed", "evaluate"), job_id="job_a"),
        grid.task("snap", "evaluate", base=grid.base(snapshot=True)),
    ]
    for task in tasks:
        fresh = replace(grid.spec, name=task.task_id)
        outcome = daemon.run(replace(task, spec=fresh)).outcome
        assert outcome.base_hash == grid.hash
        assert outcome.status == "done"


def test_an_older_version_can_be_evaluated_after_a_newer_one(grid: Grid, daemon: Daemon) -> None:
    old = grid.task("old", "evaluate")
    grid.merge([daemon.run(grid.task("a"))])
    daemon.run(grid.task("new", "evaluate"))
    outcome = daemon.run(old).outcome
    assert outcome.base_hash == grid.hashes[0]


def test_a_version_that_hashes_otherwise_is_refused_and_the_next_task_recovers(
    grid: Grid, daemon: Daemon
) -> None:
    wrong = grid.task("wrong", base=replace(grid.base(), weights_hash="0" * 64))
    outcome = daemon.run(wrong).outcome
    assert (outcome.status, outcome.error_code) == ("failed", "blob.hash")
    assert daemon.run(grid.task("right")).outcome.status == "done"


def test_evaluation_sees_the_same_batches_each_time(grid: Grid, daemon: Daemon) -> None:
    few = [daemon.run(grid.task(n, "evaluate", params={"batches": 2})).outcome for n in "ab"]
    many = daemon.run(grid.task("c", "evaluate", params={"batches": 10**6})).outcome
    assert few[0].metrics == few[1].metrics
    assert few[0].metrics["held_out_tokens"] == 2 * B * 8
    assert many.metrics["held_out_tokens"] == grid.dataset.held_out_sequences * 8


def test_a_sample_is_generated_and_repeats_itself(grid: Grid, daemon: Daemon) -> None:
    knobs = {"prompt": "1 and", "max_tokens": 9, "temperature": 0.9, "seed": 4}
    texts = [daemon.run(grid.task(n, "generate", params=knobs)).outcome.text for n in "ab"]
    assert texts[0] == texts[1] != ""
    empty = daemon.run(grid.task("c", "generate", params={"prompt": ""})).outcome
    assert empty.status == "done"


def test_finish_ends_a_task_with_what_was_really_done(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = threading.Event()
    daemons: list[Daemon] = []
    read = desk.SampleReader.batches

    def batches(self: desk.SampleReader, *args: object) -> object:
        if not late.is_set():
            late.set()
            daemons[0].send(wire.Gate(finish=True))
            # The gate is moved by another thread: wait until it has read the line.
            while not limits().finish:
                threading.Event().wait(0.001)
        return read(self, *args)  # type: ignore[arg-type]

    channels: list[child.Channel] = []
    start = child.Child.__init__

    def watched(self: child.Child, channel: child.Channel, clock: object) -> None:
        channels.append(channel)
        start(self, channel, clock)  # type: ignore[arg-type]

    def limits() -> wire.Gate:
        return channels[0]._limits

    monkeypatch.setattr(child.Child, "__init__", watched)
    monkeypatch.setattr(desk.SampleReader, "batches", batches)
    for daemon in serve(grid):
        daemons.append(daemon)
        outcome = daemon.run(grid.task("a")).outcome
        assert outcome.status == "done"
        assert (outcome.steps, outcome.tokens) == (1, B * 8)
        assert outcome.samples == (SampleRange(0, B),)
        assert outcome.delta is not None
        # The next task is not meant.
        assert daemon.run(grid.task("b")).outcome.steps == H


def test_a_cancelled_task_fails_and_the_child_goes_on(grid: Grid, daemon: Daemon) -> None:
    task = grid.task("a")
    outcome = daemon.run(
        task, on_need=lambda: daemon.send(wire.Cancel(task.task_id, "the job was cancelled"))
    ).outcome
    assert (outcome.status, outcome.error_code) == ("failed", "task.failed")
    assert "the job was cancelled" in outcome.reason
    assert outcome.base_hash == grid.hash
    daemon.send(wire.Cancel(task.task_id, "late"))
    assert daemon.run(grid.task("b")).outcome.status == "done"


def test_a_defect_in_a_task_is_a_failed_attempt_and_is_logged(
    grid: Grid, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: desk.Desk, *args: object) -> None:
        raise KeyError("something")

    with monkeypatch.context() as patch:
        patch.setattr(desk.Desk, "evaluate", broken)
        outcome = daemon.run(grid.task("a", "evaluate")).outcome
    assert (outcome.status, outcome.error_code) == ("failed", "internal.fault")
    assert "KeyError" in outcome.reason
    logged = [m for m in daemon.lines if isinstance(m, wire.LogLine)]
    assert "broken" in logged[0].fields["traceback"]
    assert daemon.run(grid.task("b")).outcome.status == "done"


@pytest.mark.parametrize("problem", [MemoryError(), OutOfMemory("node.memory", "too small")])
def test_a_task_that_does_not_fit_says_so(
    grid: Grid, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def starved(self: desk.Desk, *args: object) -> None:
        raise problem

    monkeypatch.setattr(desk.Desk, "train", starved)
    assert daemon.run(grid.task("a")).outcome.error_code == "node.memory"


def test_samples_that_do_not_fill_the_steps_are_refused(grid: Grid, daemon: Daemon) -> None:
    outcome = daemon.run(grid.task("a", samples=(SampleRange(0, 3),))).outcome
    assert (outcome.status, outcome.error_code) == ("failed", "protocol.malformed")
    assert outcome.base_hash == grid.hash


def test_a_device_that_is_not_here_is_a_failed_attempt(grid: Grid, daemon: Daemon) -> None:
    daemon.send(wire.Run(grid.task("a"), str(grid.folder), "abacus", 1))
    done = daemon.read()
    assert isinstance(done, wire.Done)
    assert done.outcome.error_code == "spec.plan"


def rounds_of(daemon: Daemon, tasks: list[Assignment]) -> list[str]:
    found = []
    for task in tasks:
        delta = daemon.run(task).outcome.delta
        assert delta is not None
        found.append(delta.sha256)
    return found


def test_kept_moments_change_the_next_round_and_fresh_ones_do_not(
    daemon: Daemon, keeping: Daemon
) -> None:
    for which, differs in ((daemon, False), (keeping, True)):
        task = which.grid.task("a", inner_step_offset=H)
        first, second = rounds_of(which, [task, task])
        assert (first != second) == differs


def test_a_failed_task_leaves_no_moments_behind(
    keeping: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = keeping.grid
    task = grid.task("a", inner_step_offset=H)
    (first,) = rounds_of(keeping, [task])

    def broken(*args: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(desk, "write_for", broken)
        assert keeping.run(grid.task("b")).outcome.error_code == "io.file"
    assert rounds_of(keeping, [task]) == [first]


def test_only_the_latest_jobs_stay_warm(grid: Grid, daemon: Daemon) -> None:
    for name in ("job_x", "job_y", "job_z", "job_z"):
        daemon.run(replace(grid.task("a", "evaluate"), job_id=name))
    opened = daemon.needed.count(grid.data.manifest.sha256)
    assert opened == 3
    daemon.run(replace(grid.task("a", "evaluate"), job_id="job_x"))
    assert daemon.needed.count(grid.data.manifest.sha256) == 4
