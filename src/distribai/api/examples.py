"""One example of every request and answer, for the OpenAPI description.

They are made of the models themselves, so that none can be out of step with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from distribai.api import answers, certificates, examples_people, why
from distribai.core.forecast import forecast, overhead_of
from distribai.core.known import Known
from distribai.core.phases import Measured
from distribai.core.plain import to_plain
from distribai.core.proposal import propose
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec

AT = 1_790_000_000.0
"""A moment in database time: seconds since 1970."""

JOB = "job_mfrggzdfmztwq2lk"
TASK = "task_nbswy3dpfqqho33s"
NODE = "node_o5xxe3deebuw4ylsmnuxa43p"
HOOK = "hook_pjwgk43tnfxg64tf"
CURSOR = "1.0.4711"

BLOB = BlobRef("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", 412_345)
SPEC = JobSpec(
    name="my-model",
    model=ModelSpec("decoder_transformer", {"dim": 128, "layers": 4, "heads": 4, "ffn_dim": 384}),
    data=DataSpec(source="blobs", files=(BLOB,)),
    steps=1000,
    batch=16,
    seq_len=256,
)
PLAN: dict[str, Any] = {"rounds": 20, "nodes": 3, "parameters": 1_048_576}

OVERHEAD = overhead_of(SPEC, None)
MACHINES = (
    Known(NODE, gflops=9000.0, up_mbps=10.0, down_mbps=40.0),
    Known(f"{NODE[:-1]}b", gflops=9000.0, up_mbps=0.1, down_mbps=2.0),
)

EVENT = answers.EventRecord(
    cursor=CURSOR,
    at=AT,
    kind="task.accepted",
    job_id=JOB,
    task_id=TASK,
    node_id=NODE,
    data={"phase": "train", "round": 3},
)
JOB_LINE = answers.JobSummary(
    id=JOB,
    name="my-model",
    state="running",
    reason="",
    priority="P2",
    version=3,
    rounds_total=20,
    nodes_working=3,
    created_at=AT,
    created_by="operator",
    started_at=AT + 5,
    ended_at=None,
    held_out_loss=4.21,
)
ROUND = answers.RoundRecord(
    number=2,
    take=0,
    state="merged",
    reason="",
    opened_at=AT,
    deadline_at=AT + 60,
    closed_at=AT + 41,
    members=[answers.MemberRecord(node_id=NODE, device=0, steps=50)],
    accepted=3,
    tokens=614_400,
)
HELD_OUT = answers.HeldOut(version=3, loss=4.21)
BYTES = answers.ByteTotals(
    weights_up=12_600_000, weights_down=4_200_000, data_up=0, data_down=900_000
)
PROGRESS = answers.RoundProgress(
    number=3,
    take=0,
    state="open",
    opened_at=AT,
    deadline_at=None,
    slots=3,
    submitted=1,
    accepted=1,
    step=31.0,
    steps=50,
    mean_loss=4.3,
    tokens_per_s=9_800.0,
    eta_s=640.0,
)
TASK_LINE = answers.TaskRecord(
    id=TASK,
    job_id=JOB,
    round=3,
    take=0,
    phase="train",
    state="leased",
    node_id=NODE,
    device=0,
    attempt=1,
    samples=[{"start": 2400, "stop": 3200}],
    steps=50,
    step=31,
    loss=4.3,
    tokens_per_s=3_200.0,
    tokens=0,
    reason="",
    text="",
    metrics={},
    causes=[],
    created_at=AT,
    leased_at=AT + 1,
    ended_at=None,
)
WEBHOOK = answers.WebhookRecord(
    id=HOOK,
    url="https://example.com/hooks/distribai",
    kinds=["job.*"],
    state="active",
    reason="",
    created_at=AT,
    created_by="operator",
    cursor=CURSOR,
    queued=0,
    failures=0,
    failing_since=None,
    next_at=AT,
    delivered_at=AT + 30,
)
REASON = why.Reason(
    code="workers",
    text="A round needs 3 devices; 2 are here.",
    hint="Start another node: distribai node start --join LINK",
    until=None,
    job_id=JOB,
    task_id="",
    nodes=[],
)

_MODELS: Mapping[str, BaseModel] = {
    "EventRecord": EVENT,
    "Feed": answers.Feed(items=[EVENT], cursor=CURSOR),
    "JobId": answers.JobId(id=JOB, state="submitted"),
    "Challenge": certificates.Challenge(challenge="eyJhbGciOiJFZERTQSIs..."),
    "CertificateBody": certificates.CertificateBody(
        public_key="ab" * 32,
        challenge="eyJhbGciOiJFZERTQSIs...",
        request="-----BEGIN CERTIFICATE REQUEST-----\n...",
        signature="cd" * 64,
        invite="...",
    ),
    "Certificate": certificates.Certificate(
        certificate="-----BEGIN CERTIFICATE-----\n...", lifetime_s=86_400
    ),
    "NodeState": answers.NodeState(
        id=NODE,
        liveness="online",
        standing="quarantined",
        intent="contribute",
        ordered="contribute",
        standing_reason="It failed 3 jobs in which other nodes did not.",
    ),
    "JobSummary": JOB_LINE,
    "JobRecord": answers.JobRecord(
        **{k: v for k, v in JOB_LINE if k not in ("priority", "held_out_loss")},
        spec=SPEC,
        decided_at=AT + 2,
        now=AT + 160,
        parameters=1_048_576,
        tokens=1_843_200,
        round=PROGRESS,
        held_out=[HELD_OUT],
        bytes=BYTES,
        dataset={"tokens": 9_300_000},
        plan=PLAN,
        forecast=forecast(SPEC, MACHINES, OVERHEAD),
        measured=Measured(3, 19.2, 14.1, 0.9, 3.4, 0.8, 0.734, 0.7),
    ),
    "RoundRecord": ROUND,
    "RoundProgress": PROGRESS,
    "HeldOut": HELD_OUT,
    "ByteTotals": BYTES,
    "TaskRecord": TASK_LINE,
    "VersionRecord": answers.VersionRecord(
        version=3,
        weights_hash=BLOB.sha256,
        weights=BLOB,
        update=BLOB,
        contributors=3,
        tokens=614_400,
        held_out_loss=4.21,
        created_at=AT,
    ),
    "LogRecord": answers.LogRecord(
        cursor="815",
        at=AT,
        level="info",
        message="Round 3 is merged into version 3 from 3 submissions.",
        job_id=JOB,
        task_id="",
        node_id="",
        fields={},
    ),
    "NodeRecord": answers.NodeRecord(
        id=NODE,
        name="my-laptop",
        liveness="online",
        standing="trusted",
        intent="contribute",
        software="0.1.0",
        devices=[
            answers.DeviceRecord(index=0, type="cpu", name="x86_64", memory_mb=16_000, threads=8)
        ],
        joined_at=AT,
        last_heard_at=AT + 155,
        tasks=[TASK],
        bytes_up=4_200_000,
        bytes_down=2_100_000,
    ),
    "GridSummary": answers.GridSummary(
        mode="trusted",
        grid_id="grid_mfrggzdfmztwq2lk",
        software="0.1.0",
        database="postgresql",
        ok=True,
        problems=[],
        now=AT,
        nodes_online=3,
        nodes_degraded=0,
        nodes_offline=1,
        nodes_working=3,
        jobs={"running": 1, "completed": 4},
        tasks_queued=0,
        tasks_leased=3,
        replicas=["grid-a:8766", "grid-b:8766"],
    ),
    "PlanAnswer": answers.PlanAnswer(
        spec=SPEC,
        plan=PLAN,
        here=3,
        resting=0,
        forecast=forecast(SPEC, MACHINES, OVERHEAD),
        proposal=propose(SPEC, MACHINES, OVERHEAD),
    ),
    "Generation": answers.Generation(
        task_id=TASK, version=20, prompt="def ", text="main() -> None:\n"
    ),
    "WebhookRecord": WEBHOOK,
    "WebhookMade": answers.WebhookMade(**dict(WEBHOOK), secret=f"whsec_{'5e' * 32}"),
    "DeliveryRecord": answers.DeliveryRecord(
        id="dlv_16",
        webhook_id=HOOK,
        kind="job.completed",
        cursor=CURSOR,
        state="delivered",
        attempts=1,
        status=204,
        reason="",
        seconds=0.08,
        created_at=AT,
        attempted_at=AT + 1,
        ended_at=AT + 1,
    ),
    "JobWhy": why.JobWhy(
        id=JOB, name="my-model", state="queued", now=AT, waiting=True, reasons=[REASON]
    ),
    "Reason": REASON,
    "NodeWhy": why.NodeWhy(
        id=NODE,
        name="my-laptop",
        liveness="online",
        standing="trusted",
        intent="contribute",
        last_heard_at=AT - 4,
        now=AT,
        able=True,
        devices=[],
        reasons=[REASON],
    ),
    "Problem": answers.Problem(
        type="urn:distribai:error:job.unknown",
        title="No job has that id or name.",
        status=404,
        detail="No job has the id or name 'my-modle'.",
        code="job.unknown",
        hint="`distribai job list` lists all jobs.",
        request_id="req_mfrggzdfmztwq2lk",
    ),
}

EXAMPLES: Mapping[str, Any] = {
    **{name: model.model_dump(mode="json") for name, model in _MODELS.items()},
    "JobSpec": to_plain(SPEC),
    **{name: model.model_dump(mode="json") for name, model in examples_people.MODELS.items()},
    "SubmitBody": {"spec": to_plain(SPEC), "organization": "lab"},
    "WeightBody": {"weight": 4.0},
    "WhyBody": {"why": "The data has a mistake in it."},
    "ReasonBody": {"why": "The grid is full this week."},
    "GenerateBody": {"prompt": "def ", "max_tokens": 100, "temperature": 0.8, "seed": 1},
    "BeginUpload": {"sha256": BLOB.sha256, "size": BLOB.size},
    "Fetched": {"bytes": BLOB.size},
    "UploadState": {"complete": False, "upload_id": "up_mfrggzdfmztwq2lk", "offset": 0},
    "WebhookBody": {"url": WEBHOOK.url, "kinds": ["job.*"]},
}
"""By the model's name."""
