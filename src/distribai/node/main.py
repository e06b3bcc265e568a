"""The node as a program of its own: signals and exit status around the daemon."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

import structlog

from distribai.node.daemon import Daemon
from distribai.sections import NodeSettings

log = structlog.get_logger("distribai.node")

INTERRUPTED = 130
"""Exit status of a program that was told to leave at once: 128 + SIGINT."""


def run_node(settings: NodeSettings, *, command: tuple[str, ...] = ()) -> int:
    """Run a node until it has left; the exit status.

    ``command`` starts the training child; empty means this program's own.

    The first SIGINT or SIGTERM finishes the present step, submits what was done and leaves with
    status 0; the second one leaves at once, with status 130.

    Raises:
        DistribAIError: as :meth:`distribai.node.daemon.Daemon.run`.
        OSError: as there.
    """
    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    return asyncio.run(_run(settings, command))


async def _run(settings: NodeSettings, command: tuple[str, ...]) -> int:
    daemon = Daemon(settings, command=command)
    work = asyncio.ensure_future(daemon.run())
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            log.info("leaving after the present step; once more to leave at once")
            daemon.finish(partial=True)
        else:
            work.cancel()

    _on_signals(stop)
    try:
        await work
    except asyncio.CancelledError:
        return INTERRUPTED
    return 0


def _on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # Windows has no signals in its event loop
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
