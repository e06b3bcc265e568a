from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeMessage(_message.Message):
    __slots__ = ("seq", "ack", "register", "heartbeat", "task_accept", "task_progress", "task_result", "log")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TASK_ACCEPT_FIELD_NUMBER: _ClassVar[int]
    TASK_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TASK_RESULT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ack: int
    register: RegisterSession
    heartbeat: Heartbeat
    task_accept: TaskAccept
    task_progress: TaskProgress
    task_result: TaskResult
    log: LogMessage
    def __init__(self, seq: _Optional[int] = ..., ack: _Optional[int] = ..., register: _Optional[_Union[RegisterSession, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., task_accept: _Optional[_Union[TaskAccept, _Mapping]] = ..., task_progress: _Optional[_Union[TaskProgress, _Mapping]] = ..., task_result: _Optional[_Union[TaskResult, _Mapping]] = ..., log: _Optional[_Union[LogMessage, _Mapping]] = ...) -> None: ...

class OrchestratorMessage(_message.Message):
    __slots__ = ("seq", "ack", "challenge", "register_ack", "heartbeat_ack", "task_assign", "round_complete", "control", "task_result_ack", "session_end", "session_token")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    REGISTER_ACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    TASK_ASSIGN_FIELD_NUMBER: _ClassVar[int]
    ROUND_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    TASK_RESULT_ACK_FIELD_NUMBER: _ClassVar[int]
    SESSION_END_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ack: int
    challenge: Challenge
    register_ack: RegisterAck
    heartbeat_ack: HeartbeatAck
    task_assign: TaskAssign
    round_complete: DiLoCoRoundComplete
    control: ControlMessage
    task_result_ack: TaskResultAck
    session_end: SessionEnd
    session_token: SessionToken
    def __init__(self, seq: _Optional[int] = ..., ack: _Optional[int] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., register_ack: _Optional[_Union[RegisterAck, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ..., task_assign: _Optional[_Union[TaskAssign, _Mapping]] = ..., round_complete: _Optional[_Union[DiLoCoRoundComplete, _Mapping]] = ..., control: _Optional[_Union[ControlMessage, _Mapping]] = ..., task_result_ack: _Optional[_Union[TaskResultAck, _Mapping]] = ..., session_end: _Optional[_Union[SessionEnd, _Mapping]] = ..., session_token: _Optional[_Union[SessionToken, _Mapping]] = ...) -> None: ...

class BlobRef(_message.Message):
    __slots__ = ("sha256", "size")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size: int
    def __init__(self, sha256: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class SampleRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("index", "type", "name", "memory_mb", "threads")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    index: int
    type: str
    name: str
    memory_mb: int
    threads: int
    def __init__(self, index: _Optional[int] = ..., type: _Optional[str] = ..., name: _Optional[str] = ..., memory_mb: _Optional[int] = ..., threads: _Optional[int] = ...) -> None: ...

class DeviceSpeed(_message.Message):
    __slots__ = ("device", "gflops", "memory_gbps")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GFLOPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_GBPS_FIELD_NUMBER: _ClassVar[int]
    device: int
    gflops: float
    memory_gbps: float
    def __init__(self, device: _Optional[int] = ..., gflops: _Optional[float] = ..., memory_gbps: _Optional[float] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("memory_mb", "disk_mb", "disk_mbps", "link_mbps", "isolation", "fingerprint", "speeds", "link_up_mbps", "month_bytes", "month_left", "trouble", "limit_down_mbps", "limit_up_mbps")
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    DISK_MB_FIELD_NUMBER: _ClassVar[int]
    DISK_MBPS_FIELD_NUMBER: _ClassVar[int]
    LINK_MBPS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    LINK_UP_MBPS_FIELD_NUMBER: _ClassVar[int]
    MONTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    MONTH_LEFT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_DOWN_MBPS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_UP_MBPS_FIELD_NUMBER: _ClassVar[int]
    memory_mb: int
    disk_mb: int
    disk_mbps: float
    link_mbps: float
    isolation: str
    fingerprint: str
    speeds: _containers.RepeatedCompositeFieldContainer[DeviceSpeed]
    link_up_mbps: float
    month_bytes: int
    month_left: int
    trouble: str
    limit_down_mbps: float
    limit_up_mbps: float
    def __init__(self, memory_mb: _Optional[int] = ..., disk_mb: _Optional[int] = ..., disk_mbps: _Optional[float] = ..., link_mbps: _Optional[float] = ..., isolation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., speeds: _Optional[_Iterable[_Union[DeviceSpeed, _Mapping]]] = ..., link_up_mbps: _Optional[float] = ..., month_bytes: _Optional[int] = ..., month_left: _Optional[int] = ..., trouble: _Optional[str] = ..., limit_down_mbps: _Optional[float] = ..., limit_up_mbps: _Optional[float] = ...) -> None: ...

class TaskInHand(_message.Message):
    __slots__ = ("task_id", "attempt", "device")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    attempt: int
    device: int
    def __init__(self, task_id: _Optional[str] = ..., attempt: _Optional[int] = ..., device: _Optional[int] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "grid_id", "protocol_min", "protocol_max")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    GRID_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    grid_id: str
    protocol_min: int
    protocol_max: int
    def __init__(self, nonce: _Optional[bytes] = ..., grid_id: _Optional[str] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ...) -> None: ...

class RegisterSession(_message.Message):
    __slots__ = ("protocol", "public_key", "signature", "invite", "name", "software", "devices", "tasks", "blobs", "resume_session", "received", "intent", "intent_reason", "machine", "jobs")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    RESUME_SESSION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    INTENT_FIELD_NUMBER: _ClassVar[int]
    INTENT_REASON_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    public_key: bytes
    signature: bytes
    invite: str
    name: str
    software: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskInHand]
    blobs: _containers.RepeatedScalarFieldContainer[str]
    resume_session: str
    received: int
    intent: str
    intent_reason: str
    machine: Machine
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., invite: _Optional[str] = ..., name: _Optional[str] = ..., software: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., tasks: _Optional[_Iterable[_Union[TaskInHand, _Mapping]]] = ..., blobs: _Optional[_Iterable[str]] = ..., resume_session: _Optional[str] = ..., received: _Optional[int] = ..., intent: _Optional[str] = ..., intent_reason: _Optional[str] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterAck(_message.Message):
    __slots__ = ("protocol", "node_id", "session_id", "session_token", "resumed", "received", "heartbeat_s", "keep", "drop", "ended")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node_id: str
    session_id: str
    session_token: str
    resumed: bool
    received: int
    heartbeat_s: float
    keep: _containers.RepeatedCompositeFieldContainer[TaskInHand]
    drop: _containers.RepeatedCompositeFieldContainer[TaskInHand]
    ended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., node_id: _Optional[str] = ..., session_id: _Optional[str] = ..., session_token: _Optional[str] = ..., resumed: _Optional[bool] = ..., received: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., keep: _Optional[_Iterable[_Union[TaskInHand, _Mapping]]] = ..., drop: _Optional[_Iterable[_Union[TaskInHand, _Mapping]]] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionToken(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("code", "message", "hint", "retry")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    hint: str
    retry: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., retry: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("uptime_s", "tasks", "bytes_up", "bytes_down", "intent", "held_versions", "intent_reason", "machine")
    class HeldVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    INTENT_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    INTENT_REASON_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    uptime_s: int
    tasks: _containers.RepeatedCompositeFieldContainer[TaskInHand]
    bytes_up: int
    bytes_down: int
    intent: str
    held_versions: _containers.ScalarMap[str, int]
    intent_reason: str
    machine: Machine
    def __init__(self, uptime_s: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[TaskInHand, _Mapping]]] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., intent: _Optional[str] = ..., held_versions: _Optional[_Mapping[str, int]] = ..., intent_reason: _Optional[str] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("next_s",)
    NEXT_S_FIELD_NUMBER: _ClassVar[int]
    next_s: float
    def __init__(self, next_s: _Optional[float] = ...) -> None: ...

class UpdateRef(_message.Message):
    __slots__ = ("version", "blob", "weights_hash")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    version: int
    blob: BlobRef
    weights_hash: str
    def __init__(self, version: _Optional[int] = ..., blob: _Optional[_Union[BlobRef, _Mapping]] = ..., weights_hash: _Optional[str] = ...) -> None: ...

class WeightsRef(_message.Message):
    __slots__ = ("version", "weights_hash", "snapshot", "snapshot_version", "updates", "kept")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    version: int
    weights_hash: str
    snapshot: BlobRef
    snapshot_version: int
    updates: _containers.RepeatedCompositeFieldContainer[UpdateRef]
    kept: KeptRef
    def __init__(self, version: _Optional[int] = ..., weights_hash: _Optional[str] = ..., snapshot: _Optional[_Union[BlobRef, _Mapping]] = ..., snapshot_version: _Optional[int] = ..., updates: _Optional[_Iterable[_Union[UpdateRef, _Mapping]]] = ..., kept: _Optional[_Union[KeptRef, _Mapping]] = ...) -> None: ...

class KeptRef(_message.Message):
    __slots__ = ("version", "blob")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    version: int
    blob: BlobRef
    def __init__(self, version: _Optional[int] = ..., blob: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class OwnWork(_message.Message):
    __slots__ = ("task_id", "attempt", "merged")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    attempt: int
    merged: bool
    def __init__(self, task_id: _Optional[str] = ..., attempt: _Optional[int] = ..., merged: _Optional[bool] = ...) -> None: ...

class TaskAssign(_message.Message):
    __slots__ = ("job_id", "task_id", "attempt", "round", "phase", "paradigm", "executor", "isolation", "device", "base", "dataset", "samples", "spec_json", "inner_step_offset", "steps", "deadline_s", "env", "params_json", "own")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PARADIGM_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    task_id: str
    attempt: int
    round: int
    phase: str
    paradigm: str
    executor: str
    isolation: str
    device: int
    base: WeightsRef
    dataset: BlobRef
    samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    spec_json: str
    inner_step_offset: int
    steps: int
    deadline_s: float
    env: _containers.ScalarMap[str, str]
    params_json: str
    own: _containers.RepeatedCompositeFieldContainer[OwnWork]
    def __init__(self, job_id: _Optional[str] = ..., task_id: _Optional[str] = ..., attempt: _Optional[int] = ..., round: _Optional[int] = ..., phase: _Optional[str] = ..., paradigm: _Optional[str] = ..., executor: _Optional[str] = ..., isolation: _Optional[str] = ..., device: _Optional[int] = ..., base: _Optional[_Union[WeightsRef, _Mapping]] = ..., dataset: _Optional[_Union[BlobRef, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., spec_json: _Optional[str] = ..., inner_step_offset: _Optional[int] = ..., steps: _Optional[int] = ..., deadline_s: _Optional[float] = ..., env: _Optional[_Mapping[str, str]] = ..., params_json: _Optional[str] = ..., own: _Optional[_Iterable[_Union[OwnWork, _Mapping]]] = ...) -> None: ...

class TaskAccept(_message.Message):
    __slots__ = ("task_id", "attempt", "accepted", "reason")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    attempt: int
    accepted: bool
    reason: str
    def __init__(self, task_id: _Optional[str] = ..., attempt: _Optional[int] = ..., accepted: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class TaskProgress(_message.Message):
    __slots__ = ("task_id", "attempt", "step", "steps", "loss", "tokens_per_s")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    attempt: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    def __init__(self, task_id: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class TaskResult(_message.Message):
    __slots__ = ("task_id", "attempt", "status", "delta", "samples", "steps", "tokens", "base_hash", "metrics", "text", "error_code", "reason", "signature")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    attempt: int
    status: str
    delta: BlobRef
    samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    steps: int
    tokens: int
    base_hash: str
    metrics: _containers.ScalarMap[str, float]
    text: str
    error_code: str
    reason: str
    signature: bytes
    def __init__(self, task_id: _Optional[str] = ..., attempt: _Optional[int] = ..., status: _Optional[str] = ..., delta: _Optional[_Union[BlobRef, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., base_hash: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., text: _Optional[str] = ..., error_code: _Optional[str] = ..., reason: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class TaskResultAck(_message.Message):
    __slots__ = ("task_id", "attempt", "counted", "code", "reason")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    attempt: int
    counted: bool
    code: str
    reason: str
    def __init__(self, task_id: _Optional[str] = ..., attempt: _Optional[int] = ..., counted: _Optional[bool] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DiLoCoRoundComplete(_message.Message):
    __slots__ = ("job_id", "round", "version", "weights", "job_done")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JOB_DONE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    round: int
    version: int
    weights: WeightsRef
    job_done: bool
    def __init__(self, job_id: _Optional[str] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., weights: _Optional[_Union[WeightsRef, _Mapping]] = ..., job_done: _Optional[bool] = ...) -> None: ...

class ControlMessage(_message.Message):
    __slots__ = ("action", "task_id", "reason", "within_s")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    action: str
    task_id: str
    reason: str
    within_s: float
    def __init__(self, action: _Optional[str] = ..., task_id: _Optional[str] = ..., reason: _Optional[str] = ..., within_s: _Optional[float] = ...) -> None: ...

class LogMessage(_message.Message):
    __slots__ = ("level", "message", "task_id", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    level: str
    message: str
    task_id: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, level: _Optional[str] = ..., message: _Optional[str] = ..., task_id: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...
