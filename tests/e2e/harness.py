"""Real processes over loopback: start them, wait on conditions with a cap, leave none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from distribai.client import Client

T = TypeVar("T")

EVERYTHING = os.environ.get("CHAOS") == "all"
"""Whether ``make chaos`` runs: everything, however long it takes."""

CLI = [str(Path(sys.executable).with_name("distribai"))]
CAP_S = 180.0
"""How long any condition may take on a busy machine with two cores before the test gives up."""

FAST = {
    "DISTRIBAI_LIVENESS_HEARTBEAT_S": "0.5",
    "DISTRIBAI_LIVENESS_DEGRADED_S": "2",
    "DISTRIBAI_LIVENESS_OFFLINE_S": "4",
    "DISTRIBAI_LIVENESS_STARTUP_GRACE_S": "5",
    "DISTRIBAI_LIVENESS_TICK_S": "0.5",
}


def wait_for(what: str, probe: Callable[[], T | None], cap_s: float = CAP_S) -> T:
    """The first truthy answer of ``probe``; fails the test with ``what`` after ``cap_s``."""
    end = time.monotonic() + cap_s
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited {cap_s} s in vain: {what}")
        time.sleep(0.2)


def descendants(pid: int) -> list[psutil.Process]:
    """Living processes below ``pid``."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def clean_environment() -> dict[str, str]:
    """This process's environment without settings that another test or a person has left in it."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DISTRIBAI_")}


class GridProcesses:
    """One orchestrator and its nodes, each a real process with its own home below ``root``."""

    def __init__(self, root: Path, env: dict[str, str] | None = None) -> None:
        self.root = root
        self.env = {
            **clean_environment(),
            **FAST,
            **(env or {}),
            "DISTRIBAI_HOME": str(root / "home"),
            "OMP_NUM_THREADS": "1",
        }
        self.orchestrator: subprocess.Popen[str] | None = None
        self.nodes: list[subprocess.Popen[str]] = []
        self.ready: dict[str, Any] = {}
        self.token = ""
        self._seen: set[int] = set()

    @property
    def state(self) -> Path:
        """The orchestrator's state directory."""
        return self.root / "home" / "state" / "orchestrator"

    def start_orchestrator(self, *arguments: str, command: Sequence[str] = CLI) -> None:
        """Start it on free ports (the same ones after the first time) and wait until it serves."""
        ports = ["--grpc-port", "0", "--http-port", "0"]
        if self.ready:
            ports = [
                "--grpc-port",
                str(self.ready["grpc"].rsplit(":", 1)[1]),
                "--http-port",
                str(self.ready["http"].rsplit(":", 1)[1]),
            ]
        self.orchestrator = self.spawn(
            "orchestrator", "orchestrator", "start", "--json", *ports, *arguments, command=command
        )
        assert self.orchestrator.stdout is not None
        line = self.orchestrator.stdout.readline()
        if not line:
            log = (self.root / "orchestrator.log").read_text()
            raise AssertionError(f"the orchestrator did not come up:\n{log}")
        self.ready = json.loads(line)
        self.token = self.ready["operator_token"] or self.token
        self.env["DISTRIBAI_URL"] = self.ready["url"]

    def start_node(
        self, *arguments: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start one more node with a state directory of its own."""
        name = f"node{len(self.nodes)}"
        node = self.spawn(
            name,
            "node",
            "start",
            "--join",
            self.ready["join_link"],
            "--state-dir",
            str(self.root / name),
            "--threads",
            "1",
            "--device",
            "cpu",
            "--name",
            name,
            *arguments,
            env=env,
        )
        self.nodes.append(node)
        return node

    def spawn(
        self,
        log: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        command: Sequence[str] = CLI,
    ) -> subprocess.Popen[str]:
        """Start a process of this grid; what it says on stderr goes to ``<log>.log``."""
        with open(self.root / f"{log}.log", "a") as stderr:
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**self.env, **(env or {})},
                cwd=self.root,
                text=True,
            )
        self._seen.add(process.pid)
        return process

    def cli(self, *arguments: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        done = subprocess.run(
            [*CLI, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.env,
            cwd=self.root,
            timeout=CAP_S,
            check=False,
        )
        if check is not None and done.returncode != check:
            raise AssertionError(
                f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def json(self, *arguments: str) -> Any:
        """The JSON document that a command prints."""
        return json.loads(self.cli(*arguments, "--json").stdout)

    def look(self, what: Callable[[Client], T]) -> T:
        """Ask the orchestrator without starting a process: what waits must not slow down what it
        waits for."""
        with Client(self.ready["url"], self.token, ca=self.ready["ca"]) as client:
            return what(client)

    def stop(self) -> list[str]:
        """End everything; names of processes that had to be killed."""
        processes = [p for p in [*self.nodes, self.orchestrator] if p is not None]
        below = [c for p in processes for c in descendants(p.pid)]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
        stubborn: list[str] = []
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                stubborn.append(str(process.args))
                process.kill()
                process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
        _, left = psutil.wait_procs(below, timeout=10)
        for child in left:
            stubborn.append(f"child {child.pid}")
            child.kill()
        return stubborn


@contextmanager
def grid(root: Path, nodes: int, env: dict[str, str] | None = None) -> Iterator[GridProcesses]:
    """A running grid; on leaving nothing of it may be left, and nothing had to be killed."""
    root.mkdir(parents=True, exist_ok=True)
    processes = GridProcesses(root, env)
    failed = True
    try:
        processes.start_orchestrator()
        for _ in range(nodes):
            processes.start_node()
        yield processes
        failed = False
    finally:
        stubborn = processes.stop()
        if failed:
            for log in sorted(root.glob("*.log")):
                sys.stderr.write(f"\n--- {log.name}\n{log.read_text()[-4000:]}")
    assert not stubborn, f"had to be killed: {stubborn}"
