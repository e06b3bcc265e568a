from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest

from distribai.core import child as wire
from distribai.training.channel import Channel, ChannelClosed, TaskCancelled

from .daemon import Grid, make_spec


def opened(*messages: wire.Message, waits: list[float] | None = None) -> Channel:
    """A channel that has taken in ``messages`` and is still open."""

    def wait(condition: threading.Condition, seconds: float) -> None:
        assert waits is not None
        waits.append(seconds)

    channel = Channel(io.BytesIO(), io.BytesIO(), wait)
    for message in messages:
        channel._take(message)
    return channel


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> wire.Run:
    grid = Grid(tmp_path_factory.mktemp("grid"), make_spec())
    return wire.Run(grid.task("a"), "", "cpu", 1)


def test_an_open_gate_lets_through() -> None:
    channel = opened()
    assert channel(1.0)
    assert not channel.exact


def test_a_share_sleeps_in_proportion_to_the_step() -> None:
    waits: list[float] = []
    channel = opened(wire.Gate(share=0.25), waits=waits)
    assert channel(2.0)
    assert waits == [6.0]
    assert channel.exact
    assert channel(0.0)
    assert waits == [6.0]


def test_finish_ends_the_present_task_and_not_the_next(run: wire.Run) -> None:
    channel = opened(run, wire.Gate(share=0.5, finish=True))
    assert not channel(0.0)
    channel._take(run)
    assert channel(0.0)
    assert channel.exact


def test_a_pause_blocks_until_it_is_lifted() -> None:
    channel = opened(wire.Gate(pause=True))
    passed = threading.Event()
    thread = threading.Thread(target=lambda: channel(0.0) and passed.set())
    thread.start()
    assert not passed.is_set()
    channel._take(wire.Gate())
    thread.join(60)
    assert passed.is_set()


class Steps:
    """A task of ten steps whose gate is passed every ``seconds``."""

    def __init__(self, run: wire.Run) -> None:
        self.now, self.left, self.run = 0.0, 10, run
        self.channel = Channel(io.BytesIO(), io.BytesIO(), clock=lambda: self.now)
        self.channel._take(run)
        self.channel.next_run()
        assert self.channel(0.0)

    def step(self, seconds: float = 2.0) -> bool:
        self.now += seconds
        self.left -= 1
        return self.channel(seconds, self.left)

    def merges(self, within_s: float, task_id: str = "") -> None:
        self.channel._take(wire.Finish(task_id or self.run.assignment.task_id, within_s))


def test_a_task_that_fits_before_the_merge_goes_on_to_its_end(run: wire.Run) -> None:
    steps = Steps(run)
    assert steps.step(30.0)  # the first one compiles: it foretells nothing
    assert steps.step()
    steps.merges(16.0)
    assert steps.channel.exact
    assert [steps.step() for _ in range(8)] == [True] * 8


def test_a_task_that_does_not_fit_ends_after_the_present_step(run: wire.Run) -> None:
    steps = Steps(run)
    assert steps.step()
    assert steps.step()
    steps.merges(15.9)
    assert not steps.step()


def test_a_task_without_a_step_does_one_before_it_ends(run: wire.Run) -> None:
    steps = Steps(run)
    steps.merges(0.0)
    assert steps.channel(0.0)
    assert not steps.step()


def test_a_task_that_slows_down_on_its_way_ends_then(run: wire.Run) -> None:
    steps = Steps(run)
    assert steps.step()
    assert steps.step()
    steps.merges(17.0)
    assert steps.step()
    assert not steps.step(4.0)


def test_the_time_to_encode_is_known_from_the_task_before(run: wire.Run) -> None:
    steps = Steps(run)
    assert steps.step()
    steps.now += 5.0
    steps.channel.encoded()
    again = Steps(run)
    again.channel._encode_s = steps.channel._encode_s
    assert again.step()
    assert again.step()
    again.merges(20.9)
    assert not again.step()


def test_a_paused_task_does_not_keep_its_round_waiting(run: wire.Run) -> None:
    steps = Steps(run)
    assert steps.step()
    steps.channel._take(wire.Gate(pause=True))
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(steps.step()))
    thread.start()
    assert ended == []
    steps.merges(1000.0)
    thread.join(60)
    assert ended == [False]


def test_a_merge_goes_to_its_task_alone(run: wire.Run) -> None:
    steps = Steps(run)
    steps.merges(0.0, "task_other")
    assert steps.step()
    steps.merges(0.0)
    other = wire.Run(replace(run.assignment, task_id="task_b"), "", "cpu", 1)
    steps.channel._take(other)
    steps.channel.next_run()
    assert steps.step()


def test_a_cancel_goes_to_its_task_alone(run: wire.Run) -> None:
    channel = opened(run)
    channel.next_run()
    channel._take(wire.Cancel("task_other", "no"))
    assert channel(0.0)
    channel._take(wire.Cancel(run.assignment.task_id, "the lease is gone"))
    with pytest.raises(TaskCancelled, match="the lease is gone"):
        channel(0.0)


def test_a_cancel_that_comes_before_the_task_is_begun_counts(run: wire.Run) -> None:
    channel = opened(run, wire.Cancel(run.assignment.task_id, "too late"))
    channel.next_run()
    with pytest.raises(TaskCancelled):
        channel(0.0)


def test_a_closed_channel_ends_everything(run: wire.Run) -> None:
    channel = opened()
    channel.read_loop()
    for call in (channel.next_run, lambda: channel(0.0)):
        with pytest.raises(ChannelClosed):
            call()
    assert channel.fault is None


@pytest.mark.parametrize("line", [b"{}\n", b"no json\n", wire.encode(wire.Ready("2", ("cpu",)))])
def test_a_line_that_is_not_for_the_child_ends_the_channel(line: bytes) -> None:
    channel = Channel(io.BytesIO(line), io.BytesIO())
    channel.read_loop()
    assert channel.fault is not None


def test_sending_to_a_daemon_that_is_gone_ends_the_child() -> None:
    class Gone(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    with pytest.raises(ChannelClosed):
        Channel(io.BytesIO(), Gone()).send(wire.Need(()))
