"""Looking again and again: lists that refresh, and patience with a grid that restarts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from distribai.cli import output
from distribai.errors import Unavailable

T = TypeVar("T")

EVERY_S = 1.0
"""Seconds between two looks."""

PATIENCE_S = 120.0
"""How long a watcher bears with an orchestrator that does not answer: it may be restarting."""


class Patience:
    """Calls that may fail for a while without ending the watch."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep

    def call(self, ask: Callable[[], T]) -> T:
        """The answer of ``ask``, as soon as there is one.

        Raises:
            Unavailable: there was none for :data:`PATIENCE_S`.
        """
        silent_since: float | None = None
        while True:
            try:
                answer = ask()
            except Unavailable as problem:
                now = self._clock()
                if silent_since is None:
                    silent_since = now
                    output.note(f"{problem.message} Trying again ...")
                elif now - silent_since > PATIENCE_S:
                    raise
                self._sleep(EVERY_S)
                continue
            if silent_since is not None:
                output.note("The orchestrator is back.")
            return answer


def repeat(
    ask: Callable[[], T],
    render: Callable[[T], str],
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the answer whenever it changes, until interrupted.

    On a terminal in place; else, or with ``as_json``, one after another.
    """
    patience = Patience(sleep=sleep)
    last: Any = None
    live = _Live() if sys.stdout.isatty() and not as_json else None
    try:
        while True:
            answer = patience.call(ask)
            shown = output.plain(answer) if as_json else render(answer)
            if shown != last:
                if as_json:
                    output.json_line(shown)
                elif live is not None:
                    live.show(shown)
                else:
                    output.data(shown)
                    sys.stdout.flush()
                last = shown
            sleep(EVERY_S)
    finally:
        if live is not None:
            live.close()


class _Live:
    """Text on a terminal that replaces itself."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=False)
        self._live.start()

    def show(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text), refresh=True)

    def close(self) -> None:
        self._live.stop()
