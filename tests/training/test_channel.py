from __future__ import annotations

import io
import threading

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
