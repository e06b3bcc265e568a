"""Contribute, Pause, Finish: what the contributor and the operator want of this machine.

The governor decides, the training child obeys at its gate between two inner steps. Who pauses must
be who resumes: the contributor's own pause, the orchestrator's and that of a limit are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable

from distribai.core.child import Gate
from distribai.core.states import Intent
from distribai.errors import UsageError


class Governor:
    """The node's intent and limits.

    Args:
        share: duty cycle in (0, 1].

    Raises:
        UsageError: ``config.invalid``, a share outside (0, 1].
    """

    def __init__(self, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise UsageError(
                "config.invalid", f"share is {share}; it lies above 0 and up to 1.", field="share"
            )
        self._share = share
        self._paused_here = False
        self._paused_by_grid = False
        self._spared = ""
        self._draining = False
        self._partial = False
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change."""
        self._listeners.append(listener)

    @property
    def intent(self) -> Intent:
        """What the grid is told; a node that is leaving does not come back to contributing."""
        if self._draining:
            return Intent.DRAIN
        if self._paused or self._spared:
            return Intent.PAUSE
        return Intent.CONTRIBUTE

    @property
    def reason(self) -> str:
        """Which limit of the owner's lets the node take no tasks; empty where none does, or where
        somebody has paused it besides."""
        return self._spared if self.intent is Intent.PAUSE and not self._paused else ""

    @property
    def gate(self) -> Gate:
        """What the training child obeys now. Leaving overrides a pause: held work is let go."""
        return Gate(self._share, self._paused and not self._draining, self._partial)

    @property
    def _paused(self) -> bool:
        return self._paused_here or self._paused_by_grid

    def contribute(self) -> None:
        """Take tasks (again), as far as this machine's owner is concerned."""
        self._paused_here = False
        self._changed()

    def pause(self) -> None:
        """Stand still before the next step and take no tasks, until :meth:`contribute`."""
        self._paused_here = True
        self._changed()

    def spare(self, reason: str) -> None:
        """Take no tasks because of a limit, with the reason for people, and end those in hand as
        usual; an empty reason lifts it."""
        self._spared = reason
        self._changed()

    def finish(self, *, partial: bool = False) -> None:
        """Take no more tasks and leave when the present ones are reported.

        ``partial`` ends them after the present step, with what was really done.
        """
        self._draining = True
        self._partial = self._partial or partial
        self._changed()

    def obey(self, action: str) -> None:
        """Follow the orchestrator's ``pause``, ``resume`` or ``drain``.

        Raises:
            ValueError: another action.
        """
        if action == "drain":
            self.finish()
            return
        if action not in ("pause", "resume"):
            raise ValueError(action)
        self._paused_by_grid = action == "pause"
        self._changed()

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()
