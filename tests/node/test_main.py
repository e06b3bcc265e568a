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
from tests.node.helpers import FAKE_CHILD, GRID, Peer, ScriptedOrchestrator, assignment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and pidfd")

NODE = """
import sys
from pathlib import Path
from distribai.config import NodeSettings
from distribai.node.main import run_node
settings = NodeSettings(state_dir=Path(sys.argv[1]), join=sys.argv[2])
sys.exit(run_node(settings, command=(sys.executable, sys.argv[3])))
"""


class Node:
    """A node process at work on a task that waits, and its child."""

    def __init__(self, process: asyncio.subprocess.Process, peer: Peer, child: int) -> None:
        self.process, self.peer, self.child = process, peer, child

    def child_has_ended(self) -> bool:
        return bool(select.select([self.child], [], [], 30)[0])


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with ScriptedOrchestrator() as orchestrator:
        address = f"127.0.0.1:{orchestrator.port}"
        join = str(JoinLink("h", address, address, GRID))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", NODE, str(tmp_path / "state"), join, str(FAKE_CHILD),
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        peer = Peer()
        async with asyncio.timeout(30):
            await peer.welcome(await orchestrator.accept())
        peer.assign(assignment(params={"do": "wait"}))
        line = await peer.hear("log")
        made = Node(process, peer, os.pidfd_open(int(line.fields["pid"])))
        yield made
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
