"""From trained weights to the files that a child hands over; no torch in it."""

from __future__ import annotations

from pathlib import Path

from distribai.core.child import RESIDUAL, Run
from distribai.core.spec import BlobRef
from distribai.core.tensors import ParameterManifest
from distribai.merge.delta import DeltaHeader, write_delta, write_delta_with_feedback
from distribai.merge.feedback import Feedback
from distribai.merge.weights import Weights


def write_for(
    run: Run,
    path: Path,
    manifest: ParameterManifest,
    base: Weights,
    local: Weights,
    header: DeltaHeader,
) -> tuple[BlobRef, BlobRef | None]:
    """The delta of a task at ``path``, and what it leaves unsent, where the task has error
    feedback.

    Nothing of what was kept before is changed: the same task, trained again, gives the same files.

    Raises:
        Integrity: see :func:`distribai.merge.delta.write_delta_with_feedback`.
        OSError: a file cannot be read or written.
    """
    if run.owed is None:
        return write_delta(path, manifest, base, local, header), None
    feedback = Feedback(
        Path(run.owed.kept) if run.owed.kept else None, Path(run.out_dir) / RESIDUAL
    )
    lost = [Path(p) for p in run.owed.lost]
    return write_delta_with_feedback(path, manifest, base, local, header, feedback, lost)
