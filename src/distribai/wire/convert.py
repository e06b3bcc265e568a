"""Wire messages to and from the core's types.

Reading is strict: whatever a peer sends is checked here once, so that nothing behind this module
meets a half-filled task. Writing cannot fail for values that core types allow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from distribai.core.devices import Device, DeviceType, TaskInHand
from distribai.core.plain import Plain, canonical_json, from_plain
from distribai.core.ranges import Ranges, SampleRange
from distribai.core.spec import BlobRef, JobSpec
from distribai.core.tasks import (
    Assignment,
    DatasetRef,
    KeptRef,
    Outcome,
    OwnWork,
    Phase,
    Progress,
    UpdateRef,
    WeightsRef,
)
from distribai.core.text import clean
from distribai.wire.checks import (
    MAX_BIG,
    MAX_INT,
    MAX_NAME,
    MAX_NAMES,
    at_most,
    check_attempt,
    check_id,
    malformed,
)
from distribai.wire.specs import spec_json
from distribai.wire.v1 import distribai_pb2 as pb

T = TypeVar("T")

_SHA256 = re.compile(r"[0-9a-f]{64}")

MAX_IN_HAND = 512
"""Tasks that a node names at once: it has one a device at work, and some that wait for an
acknowledgement."""


# ------------------------------------------------------------------ references


def blob_to_wire(blob: BlobRef | None) -> pb.BlobRef | None:
    """A reference, or None, which protobuf leaves out."""
    return None if blob is None else pb.BlobRef(sha256=blob.sha256, size=blob.size)


def blob_from_wire(message: pb.BlobRef, what: str = "blob") -> BlobRef:
    """A reference with a well-formed hash.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    if not _SHA256.fullmatch(message.sha256):
        malformed(f"{what}.sha256 is {message.sha256[:80]!r}")
    return BlobRef(message.sha256, at_most(message.size, MAX_BIG, f"{what}.size"))


def ranges_to_wire(ranges: Ranges) -> list[pb.SampleRange]:
    """Sample ranges in their order."""
    return [pb.SampleRange(start=r.start, stop=r.stop) for r in ranges]


def ranges_from_wire(messages: Iterable[pb.SampleRange], what: str = "samples") -> Ranges:
    """Sample ranges in their order; whether they overlap is the reader's business.

    Raises:
        ProtocolMismatch: ``protocol.malformed``, an empty or reversed range.
    """
    try:
        ranges = tuple(SampleRange(m.start, m.stop) for m in messages)
    except ValueError as problem:
        malformed(f"{what}: {problem}")
    at_most(max((r.stop for r in ranges), default=0), MAX_BIG, what)
    return ranges


def weights_to_wire(weights: WeightsRef) -> pb.WeightsRef:
    """A reference to canonical weights."""
    return pb.WeightsRef(
        version=weights.version,
        weights_hash=weights.weights_hash,
        snapshot=blob_to_wire(weights.snapshot),
        snapshot_version=weights.snapshot_version,
        updates=[
            pb.UpdateRef(version=u.version, blob=blob_to_wire(u.blob), weights_hash=u.weights_hash)
            for u in weights.updates
        ],
        kept=None
        if weights.kept is None
        else pb.KeptRef(version=weights.kept.version, blob=blob_to_wire(weights.kept.blob)),
    )


def weights_from_wire(message: pb.WeightsRef, what: str = "base") -> WeightsRef:
    """A reference to canonical weights whose updates lead to its version without a gap.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    updates = tuple(
        UpdateRef(u.version, blob_from_wire(u.blob, f"{what}.updates"), u.weights_hash)
        for u in message.updates
    )
    first = message.version - len(updates) + 1
    if [u.version for u in updates] != list(range(first, message.version + 1)):
        malformed(f"{what}.updates do not lead to version {message.version} one by one")
    if not message.weights_hash:
        malformed(f"{what}.weights_hash is missing")
    snapshot = None
    if message.HasField("snapshot"):
        snapshot = blob_from_wire(message.snapshot, f"{what}.snapshot")
    kept = None
    if message.HasField("kept"):
        kept = KeptRef(message.kept.version, blob_from_wire(message.kept.blob, f"{what}.kept"))
    return WeightsRef(
        message.version, message.weights_hash, snapshot, message.snapshot_version, updates, kept
    )


# ------------------------------------------------------------------ tasks


def assignment_to_wire(assignment: Assignment, device: int, spec: str = "") -> pb.TaskAssign:
    """A leased task for device number ``device``; ``spec`` is its spec as :func:`spec_json` writes
    it, if that is known."""
    return pb.TaskAssign(
        job_id=assignment.job_id,
        task_id=assignment.task_id,
        attempt=assignment.attempt,
        round=assignment.round,
        phase=assignment.phase,
        paradigm=assignment.paradigm,
        executor=assignment.executor,
        isolation=assignment.isolation,
        device=device,
        base=weights_to_wire(assignment.base),
        dataset=None if assignment.data is None else blob_to_wire(assignment.data.manifest),
        samples=ranges_to_wire(assignment.samples),
        spec_json=spec or spec_json(assignment.spec),
        inner_step_offset=assignment.inner_step_offset,
        steps=assignment.steps,
        deadline_s=assignment.deadline_s,
        env=dict(assignment.env),
        params_json=canonical_json(assignment.params),
        own=[
            pb.OwnWork(task_id=w.task_id, attempt=w.attempt, merged=w.merged)
            for w in assignment.own
        ],
    )


def assignment_from_wire(message: pb.TaskAssign) -> tuple[Assignment, int]:
    """The task, and the number of the device that it is for.

    Raises:
        ProtocolMismatch: ``protocol.malformed``, with the first field that is wrong.
    """
    for name in ("job_id", "task_id", "attempt", "executor", "isolation"):
        if not getattr(message, name):
            malformed(f"TaskAssign.{name} is missing")
    if message.phase not in get_args(Phase):
        malformed(f"TaskAssign.phase is {message.phase!r}")
    if not message.HasField("base"):
        malformed("TaskAssign.base is missing")
    if not (math.isfinite(message.deadline_s) and message.deadline_s >= 0):
        malformed(f"TaskAssign.deadline_s is {message.deadline_s}")
    data = None
    if message.HasField("dataset"):
        data = DatasetRef(blob_from_wire(message.dataset, "dataset"))
    params = _json(message.params_json or "{}", "params_json")
    if not isinstance(params, dict):
        malformed("TaskAssign.params_json is not a mapping")
    assignment = Assignment(
        job_id=message.job_id,
        task_id=message.task_id,
        attempt=message.attempt,
        round=message.round,
        phase=message.phase,  # type: ignore[arg-type]  # checked against Phase above
        spec=_plain(JobSpec, _json(message.spec_json, "spec_json"), "spec_json"),
        base=weights_from_wire(message.base),
        data=data,
        paradigm=message.paradigm,
        executor=message.executor,
        isolation=message.isolation,
        samples=ranges_from_wire(message.samples),
        steps=message.steps,
        inner_step_offset=message.inner_step_offset,
        deadline_s=message.deadline_s,
        env=dict(message.env),
        params=params,
        own=tuple(OwnWork(w.task_id, w.attempt, w.merged) for w in message.own),
    )
    return assignment, message.device


def progress_to_wire(progress: Progress) -> pb.TaskProgress:
    """How far a task is."""
    return pb.TaskProgress(
        task_id=progress.task_id,
        attempt=progress.attempt,
        step=progress.step,
        steps=progress.steps,
        loss=progress.loss,
        tokens_per_s=progress.tokens_per_s,
    )


def progress_from_wire(message: pb.TaskProgress) -> Progress:
    """How far a task is. A loss may be NaN: that is what a diverging task has to tell. Infinity
    says no more than that, and a speed that is none is 0.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    check_attempt(message.task_id, message.attempt, "TaskProgress")
    speed = message.tokens_per_s
    return Progress(
        message.task_id,
        message.attempt,
        message.step,
        message.steps,
        message.loss if math.isfinite(message.loss) else math.nan,
        speed if math.isfinite(speed) and speed > 0 else 0.0,
    )


def outcome_to_wire(outcome: Outcome, signature: bytes) -> pb.TaskResult:
    """A result with its signature (:func:`distribai.wire.signing.sign_outcome`)."""
    return pb.TaskResult(
        task_id=outcome.task_id,
        attempt=outcome.attempt,
        status=outcome.status,
        delta=blob_to_wire(outcome.delta),
        samples=ranges_to_wire(outcome.samples),
        steps=outcome.steps,
        tokens=outcome.tokens,
        base_hash=outcome.base_hash,
        metrics=dict(outcome.metrics),
        text=outcome.text,
        error_code=outcome.error_code,
        reason=outcome.reason,
        signature=signature,
    )


def outcome_from_wire(message: pb.TaskResult) -> tuple[Outcome, bytes]:
    """The result and its signature, which is not yet checked.

    Raises:
        ProtocolMismatch: ``protocol.malformed``, with the first field that is wrong.
    """
    check_attempt(message.task_id, message.attempt, "TaskResult")
    if message.base_hash:
        check_id(message.base_hash, "TaskResult.base_hash")
    if len(message.metrics) > MAX_NAMES:
        malformed(f"TaskResult brings {len(message.metrics)} metrics")
    if message.status not in ("done", "failed"):
        malformed(f"TaskResult.status is {message.status!r}")
    for name, value in message.metrics.items():
        if not math.isfinite(value):
            malformed(f"TaskResult.metrics[{name[:80]!r}] is {value}")
    delta = None
    if message.HasField("delta"):
        delta = blob_from_wire(message.delta, "TaskResult.delta")
    outcome = Outcome(
        task_id=message.task_id,
        attempt=message.attempt,
        status=message.status,  # type: ignore[arg-type]  # checked above
        delta=delta,
        samples=ranges_from_wire(message.samples, "TaskResult.samples"),
        steps=at_most(message.steps, MAX_INT, "TaskResult.steps"),
        tokens=at_most(message.tokens, MAX_BIG, "TaskResult.tokens"),
        base_hash=message.base_hash,
        metrics=dict(message.metrics),
        text=message.text,
        error_code=message.error_code,
        reason=message.reason,
    )
    return outcome, message.signature


# ------------------------------------------------------------------ nodes


def device_to_wire(device: Device) -> pb.Device:
    """One device of a node."""
    return pb.Device(
        index=device.index,
        type=device.type,
        name=device.name,
        memory_mb=device.memory_mb,
        threads=device.threads,
    )


def devices_from_wire(messages: Iterable[pb.Device]) -> tuple[Device, ...]:
    """All devices of a node, each number once.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    devices = []
    for m in messages:
        if m.type not in get_args(DeviceType):
            malformed(f"Device.type is {m.type[:80]!r}")
        for what, value in (("index", m.index), ("memory_mb", m.memory_mb), ("threads", m.threads)):
            at_most(value, MAX_INT, f"Device.{what}")
        name = clean(m.name, MAX_NAME, lines=False)
        devices.append(Device(m.index, m.type, name, m.memory_mb, m.threads))  # type: ignore[arg-type]
    if len({d.index for d in devices}) != len(devices):
        malformed("two devices have the same number")
    return tuple(devices)


def in_hand_to_wire(tasks: Iterable[TaskInHand]) -> list[pb.TaskInHand]:
    """Tasks that a node works on."""
    return [pb.TaskInHand(task_id=t.task_id, attempt=t.attempt, device=t.device) for t in tasks]


def in_hand_from_wire(messages: Iterable[pb.TaskInHand]) -> tuple[TaskInHand, ...]:
    """Tasks that a node works on.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    tasks: list[TaskInHand] = []
    for m in messages:
        if len(tasks) == MAX_IN_HAND:
            malformed(f"more than {MAX_IN_HAND} tasks are in hand")
        check_attempt(m.task_id, m.attempt, "TaskInHand")
        tasks.append(TaskInHand(m.task_id, m.attempt, m.device))
    return tuple(tasks)


def accept_from_wire(message: pb.TaskAccept) -> tuple[str, int]:
    """Task and attempt that a node took or declined.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    check_attempt(message.task_id, message.attempt, "TaskAccept")
    return message.task_id, message.attempt


def held_versions_from_wire(messages: Mapping[str, int]) -> dict[str, int]:
    """Versions that a node holds, by job.

    Raises:
        ProtocolMismatch: ``protocol.malformed``.
    """
    if len(messages) > MAX_NAMES:
        malformed(f"{len(messages)} versions are held at once")
    return dict(messages)


def _json(text: str, what: str) -> Plain:
    try:
        return json.loads(text, parse_constant=lambda name: malformed(f"{what} contains {name}"))
    except ValueError as problem:
        malformed(f"{what} is not JSON ({problem})")


def _plain(kind: type[T], value: Mapping[str, Any], what: str) -> T:
    try:
        return from_plain(kind, value)
    except ValueError as problem:
        malformed(f"{what}: {problem}")
