"""An event loop whose time is virtual: whenever nothing is ready it jumps to the next timer.

Everything that runs in it (sleeps, time-outs, background duties) takes no real time but the work it
does, and happens in one fixed order: what production code hands to threads is done at once, in
place, and nothing outside of the process can wake the loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Everything waits and no timer runs: a defect of what is simulated, or of the simulation."""


class _Jump(selectors.BaseSelector):
    """Waits for nobody: lets the virtual time pass instead."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._wait = wait

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready and (timeout is None or timeout > 0):
            self._wait(timeout)
        return ready

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Any:
        return self._real.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio over virtual seconds, from ``start`` on.

    Raises:
        Stuck: (from ``run_until_complete``) nothing is ready and no timer runs.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._virtual = start
        super().__init__(_Jump(self._jump))
        # What is due within it is due now. asyncio's own is finer than the steps of a large float,
        # and a timer that is due exactly now would then be waited for in vain.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Stuck("every task of the simulation waits, and none of them for a time")
        self._virtual += timeout

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call ``func`` now: a thread's time would be real, and its end would come by chance."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except BaseException as problem:  # noqa: BLE001  # it is raised where it is awaited
            done.set_exception(problem)
        return done


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in a loop of its own until it returns; from outside of any running loop.

    Raises:
        Stuck: see :class:`VirtualLoop`.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
