"""The demo's processes: started as a person would start them, and surely ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from distribai import spawn
from distribai.errors import Unavailable

START_S = 60.0
"""How long the orchestrator may take to serve on a slow machine."""

STOP_S = 15.0
"""How long a process may take to put its things in order before it is killed."""


@dataclass
class Crew:
    """Processes of one demo below ``root``; each writes what it says to a log file there."""

    root: Path
    _members: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_orchestrator(self) -> dict[str, Any]:
        """Start it on free ports; what it prints once it serves: addresses, join link, token.

        Raises:
            Unavailable: it ended, or did not serve in time.
        """
        self._start(
            "orchestrator",
            ["orchestrator", "start", "--json", "--grpc-port", "0", "--http-port", "0"],
            {},
            stdout=subprocess.PIPE,
        )
        process = self._members["orchestrator"]
        found: list[bytes] = []
        assert process.stdout is not None
        reader = threading.Thread(
            target=lambda pipe: found.append(pipe.readline()), args=(process.stdout,), daemon=True
        )
        reader.start()
        reader.join(START_S)
        if not found or not found[0]:
            raise Unavailable(
                "grid.unreachable",
                "The demo's orchestrator did not come up. " + self.last_words("orchestrator"),
                f"Its log is {self.log('orchestrator')}.",
            )
        ready: dict[str, Any] = json.loads(found[0])
        return ready

    def start_node(self, name: str, join_link: str, threads: int) -> None:
        """Start one node with a state directory and a key of its own."""
        arguments = ["node", "start", "--join", join_link, "--name", name]
        arguments += ["--threads", str(threads), "--state-dir", str(self.root / name)]
        # Rounds of a few seconds on the viewer's screen: more often than nodes tell usually.
        environment = {"OMP_NUM_THREADS": str(threads), "DISTRIBAI_NODE_PROGRESS_S": "0.5"}
        self._start(name, arguments, environment)

    def _start(
        self,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str],
        stdout: int = subprocess.DEVNULL,
    ) -> None:
        with open(self.log(name), "ab") as log:
            self._members[name] = subprocess.Popen(
                spawn.command("cli", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
                env={
                    **spawn.environment(),
                    **environment,
                    "DISTRIBAI_HOME": str(self.root / "home"),
                },
                # A terminal's Ctrl-C is for the demo alone; it ends the others in order.
                start_new_session=os.name == "posix",
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )

    def log(self, name: str) -> Path:
        """The log file of one process."""
        return self.root / f"{name}.log"

    def last_words(self, name: str) -> str:
        """The last line of a process's log, for an error's message."""
        try:
            lines = self.log(name).read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "")

    def check(self) -> None:
        """Refuse to go on without a process that should run.

        Raises:
            Unavailable: one of them has ended.
        """
        for name, process in self._members.items():
            if process.poll() is not None:
                raise Unavailable(
                    "grid.unreachable",
                    f"The demo's {name} ended with status {process.returncode}. "
                    + self.last_words(name),
                    f"Its log is {self.log(name)}.",
                )

    def stop(self) -> None:
        """End nodes, then the orchestrator, and whatever they started; kill what does not end."""
        below: list[psutil.Process] = []
        for process in self._members.values():
            if process.poll() is None:
                try:
                    below += psutil.Process(process.pid).children(recursive=True)
                except psutil.NoSuchProcess:
                    continue
        nodes = [p for name, p in self._members.items() if name != "orchestrator"]
        # Nodes are asked twice: the demo has no use for the step they are in.
        for process in nodes:
            _ask(process)
        time.sleep(0.2)
        for process in nodes:
            _ask(process)
        _wait(nodes)
        rest = [p for name, p in self._members.items() if name == "orchestrator"]
        for process in rest:
            _ask(process)
        _wait(rest)
        _, alive = psutil.wait_procs(below, timeout=2)
        for child in alive:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self._members.values():
            if process.stdout is not None:
                process.stdout.close()


def _ask(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"Process {process.pid} did not end by itself: killing it.\n")
            process.kill()
            process.wait()
