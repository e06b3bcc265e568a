"""The fault injector: kill, freeze or starve a real process at a named point.

Orchestrator and node call :func:`distribai.points.reach` right before and right after everything
that makes something durable: each commit, fsync and rename. An :class:`Injector` is what can stand
behind these calls; the product itself never installs one, and has no switch and no environment
variable for it. To run an ordinary command with faults::

    python -m distribai.testing.faults --kill "blob.put.flushed:2" --record points.txt \\
        -- orchestrator start --json

Everything behind ``--`` is what ``distribai`` would get. The process kills itself with SIGKILL
right when it reaches ``blob.put.flushed`` for the second time, so nothing of it can still happen.

Points are patterns (``fnmatch``), so ``commit.*._publish.before`` is any commit of that name, and
``*`` is any point. What a point stands for is in the docstrings of ``distribai.durable`` (files)
and ``distribai.store.engine`` (commits). With ``--record`` alone nothing is disturbed, and the file
lists all points in the order in which they were reached; :func:`choose` makes a plan of it.

    --kill POINT[:N]            SIGKILL at the N-th time (from 1)
    --stop POINT[:N]            SIGSTOP; whoever started the process sends SIGCONT
    --full POINT[:N[:TIMES]]    OSError ENOSPC, a full disk, N-th to (N + TIMES - 1)-th time
    --sleep POINT:N:SECONDS     the thread that is there sleeps
    --while FILE                faults happen only as long as FILE exists
    --record FILE               append every point that is reached
    --clock FILE                the host's clock is wrong by the seconds that FILE holds, when asked
    --pretend SECONDS           a node's training child is distribai.testing.child, with such steps
    --without NAME              take out one protection (distribai.testing.sabotage), to prove that
                                a test would notice
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from distribai import points

SIGKILL = 9
"""Its number on every system that has signals; Windows takes it as an exit status."""

Action = Literal["kill", "stop", "full", "sleep"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Do ``action`` when a point that matches ``point`` is reached for the ``nth`` time (from 1).

    ``times`` is for how many times in a row from then on (a process is killed only once, though);
    ``seconds`` is how long ``sleep`` takes.
    """

    action: Action
    point: str
    nth: int = 1
    times: int = 1
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A point, reached for the ``nth`` time."""

    point: str
    nth: int

    def __str__(self) -> str:
        return f"{self.point}:{self.nth}"


class Injector:
    """A hook for :func:`distribai.points.install`.

    Args:
        faults: what to do where; each counts the points that match it by itself.
        record: a file to which the name of every point is appended, one a line, before any fault.
        only_while: faults happen only as long as this file exists; they are counted regardless.

    Every thread may call it. It raises ``OSError`` out of the point where a fault says ``full``.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        record: Path | None = None,
        only_while: Path | None = None,
    ) -> None:
        self._faults = tuple(faults)
        self._seen = [0] * len(self._faults)
        self._lock = threading.Lock()
        self._only_while = only_while
        self._record = (
            None
            if record is None
            else os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        )

    def __call__(self, name: str) -> None:
        """A point was reached."""
        with self._lock:
            if self._record is not None:
                os.write(self._record, f"{name}\n".encode())
            due = []
            for i, fault in enumerate(self._faults):
                if fnmatchcase(name, fault.point):
                    self._seen[i] += 1
                    if fault.nth <= self._seen[i] < fault.nth + fault.times:
                        due.append(fault)
        if due and (self._only_while is None or self._only_while.exists()):
            for fault in due:
                _do(fault, name)

    def close(self) -> None:
        """Let go of the record's file."""
        if self._record is not None:
            os.close(self._record)
            self._record = None


def _do(fault: Fault, name: str) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), SIGKILL)
        time.sleep(60.0)  # nothing may happen behind the point, however late the signal
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "full":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at {name})")
    else:
        time.sleep(fault.seconds)


def parse(action: Action, text: str) -> Fault:
    """The fault of one option, ``POINT[:N[:TIMES or SECONDS]]``.

    Raises:
        ValueError: it is none.
    """
    point, *numbers = text.split(":")
    if not point or len(numbers) > 2:
        raise ValueError(f"{text!r} is not POINT[:N[:MORE]]")
    nth = int(numbers[0]) if numbers else 1
    more = float(numbers[1]) if len(numbers) > 1 else 1.0
    if nth < 1 or more < 0:
        raise ValueError(f"{text!r}: points are counted from 1")
    if action == "sleep":
        return Fault(action, point, nth, seconds=more)
    return Fault(action, point, nth, times=int(more))


def read_record(path: Path) -> Mapping[str, int]:
    """How often each point was reached, in the order of first times; empty without a file."""
    if not path.exists():
        return {}
    return Counter(path.read_text(encoding="utf-8").splitlines())


def choose(reached: Mapping[str, int], seed: int, count: int | None = None) -> list[Hit]:
    """A plan from a record: each point once, at a time that the seed draws; or ``count`` of them.

    The same record and seed give the same plan.
    """
    chance = random.Random(seed)
    plan = [Hit(point, chance.randint(1, times)) for point, times in sorted(reached.items())]
    if count is not None and count < len(plan):
        plan = sorted(chance.sample(plan, count), key=str)
    return plan


def step_clock(offset: Path) -> None:
    """From now on ``time.time`` of this process is wrong by the seconds in the file ``offset``,
    read at each call; an absent or empty file is none. Monotonic time is untouched."""
    real = time.time

    def wrong() -> float:
        try:
            return real() + float(offset.read_text() or 0.0)
        except FileNotFoundError:
            return real()

    time.time = wrong


def pretend_training(step_s: float) -> None:
    """Nodes that this process runs start :mod:`distribai.testing.child` to train."""
    from distribai.node import main as node
    from distribai.testing import child

    node.run_node = functools.partial(node.run_node, command=child.command(step_s))


def command(*options: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs ``distribai`` with ``arguments`` and the fault ``options``."""
    return [sys.executable, "-P", "-m", "distribai.testing.faults", *options, "--", *arguments]


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distribai.testing.faults",
        description="Run a distribai command, and disturb it at named points.",
        usage="%(prog)s [options] -- COMMAND ...",
    )
    for action in ("kill", "stop", "full", "sleep"):
        parser.add_argument(f"--{action}", action="append", default=[], metavar="POINT[:N[:MORE]]")
    parser.add_argument("--while", dest="only_while", type=Path, metavar="FILE")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--clock", type=Path, metavar="FILE")
    parser.add_argument("--pretend", type=float, metavar="SECONDS")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a command with faults; its exit status, where it lives to have one."""
    parser = _arguments()
    if "--" not in argv:
        parser.error("give the command behind --")
    split = list(argv).index("--")
    options, arguments = parser.parse_args(argv[:split]), list(argv[split + 1 :])
    actions: tuple[Action, ...] = ("kill", "stop", "full", "sleep")
    try:
        faults = [parse(a, text) for a in actions for text in getattr(options, a)]
    except ValueError as problem:
        parser.error(str(problem))
    if options.clock is not None:
        step_clock(options.clock)
    if options.pretend is not None:
        pretend_training(options.pretend)
    if options.without:
        from distribai.testing import sabotage

        for name in options.without:
            sabotage.remove(name)
    points.install(Injector(faults, record=options.record, only_while=options.only_while))
    from distribai.cli.main import main as distribai

    return distribai(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
