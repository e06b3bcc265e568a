"""A child process that speaks :mod:`distribai.core.child` over its standard input and output.

It has no terminal and its own session; it ends when its standard input ends, and on Linux the
kernel kills it with the daemon. Standard error goes to a log file, whose last lines explain a
death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from distribai import spawn
from distribai.core.child import FromChild, Gate, Message, Ready, ToChild, decode, encode
from distribai.errors import DistribAIError, Unavailable, UsageError
from distribai.node.clock import Clock, within
from distribai.node.platform import child_options, kill_with_children

LINE_LIMIT = 16 * 2**20
"""Bytes of one line: a task's text, or the references of some ten thousand updates."""

LOG_LIMIT = 8 * 2**20
"""Bytes of a log file at which the next child starts a new one; one old one is kept."""

TAIL_LINES = 8
"""Last lines of standard error that explain a death."""

KILLED = -9
"""Return code of a process that somebody ended with SIGKILL: on a busy machine, the kernel."""

_OUT_OF_MEMORY = ("MemoryError", "std::bad_alloc", "can't allocate memory")

FAREWELL_S = 5.0
"""Seconds a child has to end after its standard input did, before it is killed."""


class ChildEnded(Exception):  # internal to the executor, which makes a failed outcome of it
    """The child is gone, or said something that makes no sense and was killed for it.

    ``code`` and ``reason`` are what an outcome reports.
    """

    def __init__(self, code: str, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.hint = hint

    def as_error(self) -> DistribAIError:
        """The same for people."""
        kind = UsageError if self.code == "node.torch" else Unavailable
        return kind(self.code, self.reason, self.hint)


class ChildProcess:
    """One running child; made by :func:`start`."""

    def __init__(
        self, process: asyncio.subprocess.Process, log: Path, log_start: int, clock: Clock
    ) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start
        self._clock = clock
        self._killed_because = ""
        self.ready = Ready("", ())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not been seen to end."""
        return self._process.returncode is None

    async def send(self, message: ToChild) -> None:
        """Write one line; a child that is gone shows at the next :meth:`receive`."""
        stdin = self._process.stdin
        if stdin is None or stdin.is_closing():
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(encode(message))
            await stdin.drain()

    async def receive(self) -> FromChild:
        """The next message.

        Raises:
            ChildEnded: there will be none; the process is gone.
        """
        if self._process.stdout is None:
            raise AssertionError("children are started with a pipe")
        try:
            line = await self._process.stdout.readline()
        except ValueError as problem:  # asyncio's word for a line beyond the limit
            raise await self.nonsense(f"a line of more than {LINE_LIMIT} bytes") from problem
        if not line.endswith(b"\n"):
            await self._wait_or_kill("closed its output and did not end")
            raise self._explain()
        try:
            message: Message = decode(line)
        except (ValueError, RecursionError) as problem:
            raise await self.nonsense(repr(line[:80].decode(errors="replace"))) from problem
        if isinstance(message, ToChild):
            raise await self.nonsense(f"a {message.type} message")
        return message

    async def kill(self, because: str) -> None:
        """End it at once, and wait until it is gone. ``because`` completes a sentence about it."""
        if self.alive:
            self._killed_because = because
            kill_with_children(self._process.pid)
        self._close_stdin()
        if self._process.stdout is not None:
            # asyncio calls a process ended when its pipes are; a full one must be emptied.
            while await self._process.stdout.read(1 << 16):
                pass
        await self._process.wait()

    async def close(self) -> None:
        """End its standard input and wait; kill it if that takes long."""
        self._close_stdin()
        await self._wait_or_kill("did not end when it was asked to")

    async def nonsense(self, what: str) -> ChildEnded:
        """End a child that broke the contract by sending ``what``; what to raise for it."""
        await self.kill(f"sent {what}, which makes no sense, and was ended")
        return self._explain()

    async def _wait_or_kill(self, because: str) -> None:
        try:
            await within(self._clock, FAREWELL_S, self._process.wait())
        except TimeoutError:
            await self.kill(because)
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _explain(self) -> ChildEnded:
        code = self._process.returncode or 0
        words = self._last_words()
        if self._killed_because:
            return ChildEnded("node.child", f"The training process {self._killed_because}." + words)
        if "No module named 'torch'" in words:
            return ChildEnded(
                "node.torch",
                "PyTorch is not installed on this machine.",
                "pip install 'distribai[node]'",
            )
        if code == KILLED or any(sign in words for sign in _OUT_OF_MEMORY):
            return ChildEnded(
                "node.memory",
                "The training process was killed, probably for memory." + words,
                "Free memory, or offer less of it.",
            )
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return ChildEnded("node.child", f"The training process {how}." + words)

    def _last_words(self) -> str:
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - 8192))
            lines = file.read().decode(errors="replace").strip().splitlines()
        if not lines:
            return ""
        return " Its last words: " + " | ".join(line.strip() for line in lines[-TAIL_LINES:])


def _open_log(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_LIMIT:
        log.replace(log.with_suffix(".old"))
    return log.open("ab")


async def start(
    command: Sequence[str], log: Path, gate: Gate, clock: Clock, ready_within: float
) -> ChildProcess:
    """Start a child and wait until it is ready.

    Raises:
        ChildEnded: it ended instead, was not ready in time, or could not be started.
    """
    with _open_log(log) as stderr:
        log_start = stderr.tell()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=LINE_LIMIT,
                env=spawn.environment(),
                **child_options(),
            )
        except OSError as problem:
            raise ChildEnded(
                "node.child", f"The training process could not be started: {problem}."
            ) from problem
    child = ChildProcess(process, log, log_start, clock)
    try:
        first = await within(clock, ready_within, child.receive())
    except TimeoutError as problem:
        await child.kill("was not ready in time")
        raise ChildEnded(
            "node.child", f"The training process was not ready within {ready_within:.0f} s."
        ) from problem
    except asyncio.CancelledError:
        await child.kill("was not wanted any more")
        raise
    if not isinstance(first, Ready):
        raise await child.nonsense(f"a {first.type} message before it was ready")
    child.ready = first
    await child.send(gate)
    return child
