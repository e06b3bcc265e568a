"""What a job's retry does: the rest of its steps, from its last version."""

from __future__ import annotations

from dataclasses import replace

from distribai.core.codecs import schedule_from
from distribai.core.spec import BlobRef, JobSpec


def steps_left(spec: JobSpec, version: int) -> int:
    """Inner steps that a job has left after ``version`` rounds."""
    return max(0, spec.steps - version * spec.rounds.inner_steps)


def retry_spec(spec: JobSpec, version: int, weights: BlobRef) -> JobSpec:
    """The spec of a job that goes on where another ended.

    It does the steps that are left, from ``weights``, the other's last version. From version 0 it
    is the same job again. The optimizers start afresh, so the learning rate warms up again and
    falls over the steps that are left; the outer step needs no cold start (algorithms.md A1).
    Stages of codecs begin where they would have begun in the other.

    Raises:
        ValueError: nothing is left.
    """
    if not version:
        return spec
    left = steps_left(spec, version)
    if not left:
        raise ValueError("all its rounds are merged")
    return replace(
        spec,
        steps=left,
        model=replace(spec.model, init=weights),
        outer=replace(spec.outer, ramp=0),
        rounds=replace(
            spec.rounds,
            codec_up=schedule_from(spec.rounds.codec_up, version),
            codec_down=schedule_from(spec.rounds.codec_down, version),
        ),
    )
