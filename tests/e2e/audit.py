"""What a grid's records must show after any job: see :mod:`distribai.testing.audit`."""

from __future__ import annotations

from pathlib import Path

from distribai.testing.audit import audit as look


def audit(state: Path, job_id: str) -> int:
    """Check one ended job of an orchestrator's state directory; the rounds that were replayed."""
    found = look(state, job_id)
    assert found.ok, found.problems
    return found.rounds
