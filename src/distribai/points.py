"""Named places at which a fault injector may stop this process; without one they cost a comparison.

Code that must survive a crash calls :func:`reach` right before and right after whatever makes
something durable: a commit, an fsync, a rename. ``distribai.testing.faults`` installs a hook that
kills the process at a chosen point; nothing in the product itself ever does.
"""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[str], None] | None = None


def reach(name: str) -> None:
    """This process is at the point ``name``, ``part.thing.moment``."""
    if _hook is not None:
        _hook(name)


def armed() -> bool:
    """Whether anybody wants to know of points: names that cost something need not be made else."""
    return _hook is not None


def install(hook: Callable[[str], None] | None) -> None:
    """Call ``hook`` with the name of every point from now on; None: nobody."""
    global _hook
    _hook = hook
