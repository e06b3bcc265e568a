"""The node as a process of its own: signals, exit status, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distribai.wire.joinlink import JoinLink
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import CAP_S, FAKE_CHILD, GRID, Peer, ScriptedOrchestrator, assignment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and pidfd")

NODE = """
import sys
from pathlib import Path
from distribai.sections import NodeSettings
from distribai.node.main import run_node
settings = NodeSettings(state_dir=Path(sys.argv[1]), join=sys.argv[2])
sys.exit(run_node(settings, command=(sys.executable, sys.argv[3])))
"""


class Node:
    """A node process at work on a task that waits, and its child."""

    def __init__(
        self, process: asyncio.subprocess.Process, peer: Peer, child: int, state: Path, join: str
    ) -> None:
        self.process, self.peer, self.child = process, peer, child
        self.state, self.join = state, join
        self.processes = [process]

    async def start_again(self) -> asyncio.subprocess.Process:
        """Another daemon on the same state directory."""
        self.processes.append(await start(self.state, self.join))
        return self.processes[-1]

    def child_has_ended(self) -> bool:
        return bool(select.select([self.child], [], [], 30)[0])


async def start(state: Path, join: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(state), join, str(FAKE_CHILD),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
async def orchestrator() -> AsyncIterator[ScriptedOrchestrator]:
    async with ScriptedOrchestrator() as made:
        yield made


@pytest.fixture
async def node(tmp_path: Path, orchestrator: ScriptedOrchestrator) -> AsyncIterator[Node]:
    address = f"127.0.0.1:{orchestrator.port}"
    join = str(JoinLink("h", address, address, GRID))
    state = tmp_path / "state"
    process = await start(state, join)
    peer = Peer()
    async with asyncio.timeout(CAP_S):
        await peer.welcome(await orchestrator.accept())
    peer.assign(assignment(params={"do": "wait"}))
    line = await peer.hear("log")
    made = Node(process, peer, os.pidfd_open(int(line.fields["pid"])), state, join)
    yield made
    for process in made.processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    os.close(made.child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_submits_the_partial_work_and_ends_well(
    node: Node, number: signal.Signals
) -> None:
    node.process.send_signal(number)
    result = await node.peer.hear("task_result")
    assert (result.status, result.steps) == ("done", 1)
    node.peer.acknowledge(result)
    assert await node.process.wait() == 0
    assert node.child_has_ended()


async def test_a_second_signal_ends_the_node_at_once(node: Node) -> None:
    node.process.send_signal(signal.SIGTERM)
    await node.peer.hear("task_result")
    node.process.send_signal(signal.SIGTERM)
    assert await node.process.wait() == 130
    assert node.child_has_ended()


async def test_a_killed_node_leaves_no_child_behind(node: Node) -> None:
    node.process.kill()
    await node.process.wait()
    assert node.child_has_ended()


async def test_a_killed_node_comes_back_with_its_task(
    node: Node, orchestrator: ScriptedOrchestrator
) -> None:
    node.process.kill()
    await node.process.wait()
    again = await node.start_again()
    register = await node.peer.welcome(await orchestrator.accept())
    assert [(t.task_id, t.attempt) for t in register.tasks] == [("task_a", 1)]
    assert register.public_key == node.peer.registered[0].public_key
    again.send_signal(signal.SIGTERM)
    result = await node.peer.hear("task_result")
    assert (result.status, result.steps) == ("done", 1)
    again.kill()  # before it hears of the acknowledgement
    await again.wait()
    last = await node.start_again()
    await node.peer.welcome(await orchestrator.accept())
    assert await node.peer.hear("task_result") == result
    node.peer.acknowledge(result)
    last.send_signal(signal.SIGTERM)
    assert await last.wait() == 0
    assert list((node.state / "hands").iterdir()) == []


async def test_a_frozen_node_drops_what_is_not_its_own_any_more_and_takes_new_work(
    node: Node, orchestrator: ScriptedOrchestrator
) -> None:
    node.process.send_signal(signal.SIGSTOP)
    old = node.peer.stream
    old.say(None)  # the grid has given it up and leased its task to somebody else
    node.process.send_signal(signal.SIGCONT)
    drop = [pb.TaskInHand(task_id="task_a", attempt=1)]
    register = await node.peer.welcome(await orchestrator.accept(), drop=drop)
    assert [t.task_id for t in register.tasks] == ["task_a"]
    node.peer.assign(assignment("task_b", params={"do": "wait"}))
    assert (await node.peer.hear("task_accept")).accepted
    node.peer.say(control=pb.ControlMessage(action="finish", task_id="task_b", within_s=9.0))
    result = await node.peer.hear("task_result")  # the first one: nothing of the old task came
    assert (result.task_id, result.status) == ("task_b", "done")
