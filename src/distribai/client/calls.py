"""Every request that the client can make, as a value: one list for both kinds of client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter

from distribai.api import answers
from distribai.api import why as why_answers
from distribai.core.plain import to_plain
from distribai.core.spec import JobSpec
from distribai.errors import NotFound, UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and how to read its answer.

    ``patience`` is what the server may take beyond the client's own timeout, in seconds, because
    it was asked to wait.
    """

    method: str
    path: str
    answer: Any
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience: float = 0.0

    def read(self, content: bytes) -> T:
        """The answer's body as its type; nothing for a call that answers nothing."""
        if self.answer is None:
            return None  # type: ignore[return-value]  # T is None then
        adapter: TypeAdapter[T] = TypeAdapter(self.answer)
        return adapter.validate_json(content)


PREPARATION_S = 1800.0
"""What the orchestrator may take to prepare a job's data, in seconds. A client that gives up
earlier can ask again: the idempotency key finds the job."""


def segment(ref: str, what: str, listed_by: str) -> str:
    """``ref`` as a part of an address; ``listed_by`` is the command that lists what it may be.

    Raises:
        NotFound: it cannot stand in an address: it is empty, or has a slash in it.
    """
    if ref in ("", ".", "..") or "/" in ref:
        article = "an" if what[0] in "aeio" else "a"
        raise NotFound(
            f"{what}.unknown",
            f"{ref!r} cannot name {article} {what} here.",
            f"Use the {what}'s id: `{listed_by}` shows it.",
        )
    return quote(ref, safe="")


def job_path(ref: str, tail: str = "") -> str:
    """A job's address.

    Raises:
        NotFound: ``ref`` cannot stand in an address: it is empty, or has a slash in it.
    """
    return f"/api/v1/jobs/{segment(ref, 'job', 'distribai job list')}{tail}"


def node_path(ref: str, tail: str) -> str:
    """An address below a node's.

    Raises:
        NotFound: ``ref`` cannot stand in an address: it is empty, or has a slash in it.
    """
    return f"/api/v1/nodes/{segment(ref, 'node', 'distribai nodes list')}{tail}"


def health() -> Call[answers.GridSummary]:
    """The grid's health."""
    return Call("GET", "/api/v1/health", answers.GridSummary)


def nodes(limit: int = 1000, cursor: str = "") -> Call[answers.Page[answers.NodeRecord]]:
    """One page of nodes, by id."""
    return Call("GET", "/api/v1/nodes", answers.Page[answers.NodeRecord], _page(limit, cursor))


def node_why(ref: str) -> Call[why_answers.NodeWhy]:
    """What a node holds, and why it gets no more."""
    return Call("GET", node_path(ref, "/why"), why_answers.NodeWhy)


def plan(spec: JobSpec, organization: str = "") -> Call[answers.PlanAnswer]:
    """Validate and plan, for an organization as :func:`create_job`; nothing is created."""
    body = _job(spec, organization)
    return Call("POST", "/api/v1/jobs/plan", answers.PlanAnswer, body=body)


def create_job(spec: JobSpec, idempotency_key: str, organization: str = "") -> Call[answers.JobId]:
    """Submit a job for an organization (empty: the only one that the caller may submit to). The
    answer may take as long as cutting the data into shards does."""
    return Call(
        "POST",
        "/api/v1/jobs",
        answers.JobId,
        body=_job(spec, organization),
        headers={"Idempotency-Key": idempotency_key},
        patience=PREPARATION_S,
    )


def _job(spec: JobSpec, organization: str) -> dict[str, Any]:
    body: dict[str, Any] = {"spec": to_plain(spec)}
    if organization:  # an older orchestrator knows none, and needs to be told none
        body["organization"] = organization
    return body


def jobs(
    state: str | None = None, limit: int = 100, cursor: str = ""
) -> Call[answers.Page[answers.JobSummary]]:
    """One page of jobs, newest first."""
    params: dict[str, str | int | float] = {"limit": limit, "cursor": cursor}
    if state is not None:
        params["state"] = state
    return Call("GET", "/api/v1/jobs", answers.Page[answers.JobSummary], params)


def job(ref: str) -> Call[answers.JobRecord]:
    """One job."""
    return Call("GET", job_path(ref), answers.JobRecord)


def why(ref: str) -> Call[why_answers.JobWhy]:
    """Why a job is where it is."""
    return Call("GET", job_path(ref, "/why"), why_answers.JobWhy)


def accept(ref: str) -> Call[answers.JobId]:
    """Accept a submitted job."""
    return Call("POST", job_path(ref, "/accept"), answers.JobId)


def decline(ref: str, why: str) -> Call[answers.JobId]:
    """Decline a submitted job."""
    return Call("POST", job_path(ref, "/decline"), answers.JobId, body={"why": why})


def cancel(ref: str, why: str = "") -> Call[answers.JobId]:
    """Cancel an open job."""
    return Call("POST", job_path(ref, "/cancel"), answers.JobId, body={"why": why})


def pause(ref: str) -> Call[answers.JobId]:
    """Pause a running job."""
    return Call("POST", job_path(ref, "/pause"), answers.JobId)


def resume(ref: str) -> Call[answers.JobId]:
    """Resume a paused job."""
    return Call("POST", job_path(ref, "/resume"), answers.JobId)


def retry(ref: str, idempotency_key: str) -> Call[answers.JobId]:
    """A new job from the last version of one that failed or was cancelled."""
    return Call(
        "POST",
        job_path(ref, "/retry"),
        answers.JobId,
        headers={"Idempotency-Key": idempotency_key},
        patience=PREPARATION_S,
    )


def weigh(ref: str, weight: float) -> Call[answers.JobId]:
    """Let a job weigh more or less than others of its tier.

    Raises:
        UsageError: ``usage.invalid``: the weight is no finite number, which JSON cannot say.
    """
    _finite(weight, "weight", "Give a number from 1/16 to 16; 1 is usual.")
    return Call("POST", job_path(ref, "/weight"), answers.JobId, body={"weight": weight})


def order_node(ref: str, verb: str) -> Call[answers.NodeState]:
    """Tell a node to ``pause``, ``resume`` or ``drain``."""
    return Call("POST", node_path(ref, f"/{verb}"), answers.NodeState)


def stand_node(ref: str, verb: str, why: str) -> Call[answers.NodeState]:
    """Change a node's standing: ``quarantine``, ``trust``, ``ban`` or ``pardon``."""
    return Call("POST", node_path(ref, f"/{verb}"), answers.NodeState, body={"why": why})


def rounds(
    ref: str, limit: int = 1000, cursor: str = ""
) -> Call[answers.Page[answers.RoundRecord]]:
    """One page of a job's rounds, oldest first."""
    answer = answers.Page[answers.RoundRecord]
    return Call("GET", job_path(ref, "/rounds"), answer, _page(limit, cursor))


def tasks(ref: str, limit: int = 200, cursor: str = "") -> Call[answers.Page[answers.TaskRecord]]:
    """One page of a job's tasks, oldest first."""
    answer = answers.Page[answers.TaskRecord]
    return Call("GET", job_path(ref, "/tasks"), answer, _page(limit, cursor))


def _page(limit: int, cursor: str) -> dict[str, Any]:
    return {"limit": limit, "cursor": cursor}


def versions(
    ref: str, limit: int = 1000, cursor: str = ""
) -> Call[answers.Page[answers.VersionRecord]]:
    """One page of the versions of a job's weights, from 0."""
    answer = answers.Page[answers.VersionRecord]
    return Call("GET", job_path(ref, "/versions"), answer, _page(limit, cursor))


def events(
    after: str = "",
    *,
    job: str = "",
    node: str = "",
    kinds: Sequence[str] = (),
    limit: int = 200,
) -> Call[answers.Feed]:
    """Events behind ``after``: of the grid, of a job, or of a node and its tasks."""
    path, params = feed(job, node, kinds)
    return Call("GET", path, answers.Feed, {**params, "after": after, "limit": limit})


def feed(job: str, node: str, kinds: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Address and filter of a feed of events."""
    params: dict[str, Any] = {"kind": list(kinds)} if kinds else {}
    if job and node:
        return "/api/v1/events", {**params, "job": job, "node": node}
    if job:
        return job_path(job, "/events"), params
    return (node_path(node, "/events") if node else "/api/v1/events"), params


def logs(
    ref: str, after: str = "", wait: float = 0.0, limit: int = 200
) -> Call[answers.Listing[answers.LogRecord]]:
    """Log lines behind ``after``; waits for one up to ``wait`` seconds."""
    params: dict[str, str | int | float] = {"after": after, "wait": wait, "limit": limit}
    answer = answers.Listing[answers.LogRecord]
    return Call("GET", job_path(ref, "/logs"), answer, params, patience=wait)


def generate(
    ref: str,
    prompt: str,
    *,
    version: int | None = None,
    max_tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    timeout: float = 120.0,
    idempotency_key: str = "",
) -> Call[answers.Generation]:
    """A sample from a version. With a key the same request again waits for the same sample.

    Raises:
        UsageError: ``usage.invalid``: the temperature is no finite number, which JSON cannot say.
    """
    _finite(temperature, "temperature", "Give a number from 0 (the likeliest token always) to 10.")
    body = {
        "prompt": prompt,
        "version": version,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "timeout": timeout,
    }
    path = job_path(ref, "/generate")
    headers = _key(idempotency_key)
    return Call("POST", path, answers.Generation, body=body, headers=headers, patience=timeout)


def _key(idempotency_key: str) -> dict[str, str]:
    return {"Idempotency-Key": idempotency_key} if idempotency_key else {}


def create_webhook(
    url: str, kinds: Sequence[str], idempotency_key: str
) -> Call[answers.WebhookMade]:
    """Make a webhook."""
    body = {"url": url, "kinds": list(kinds)}
    headers = _key(idempotency_key)
    return Call("POST", "/api/v1/webhooks", answers.WebhookMade, body=body, headers=headers)


def webhooks(limit: int = 100, cursor: str = "") -> Call[answers.Page[answers.WebhookRecord]]:
    """One page of webhooks."""
    answer = answers.Page[answers.WebhookRecord]
    return Call("GET", "/api/v1/webhooks", answer, _page(limit, cursor))


def webhook(webhook_id: str) -> Call[answers.WebhookRecord]:
    """One webhook."""
    return Call("GET", webhook_path(webhook_id), answers.WebhookRecord)


def delete_webhook(webhook_id: str) -> Call[None]:
    """Delete a webhook."""
    return Call("DELETE", webhook_path(webhook_id), None)


def test_webhook(webhook_id: str) -> Call[answers.DeliveryRecord]:
    """Send a test."""
    return Call("POST", webhook_path(webhook_id, "/test"), answers.DeliveryRecord)


def enable_webhook(webhook_id: str) -> Call[answers.WebhookRecord]:
    """Deliver again, from now on."""
    return Call("POST", webhook_path(webhook_id, "/enable"), answers.WebhookRecord)


def deliveries(
    webhook_id: str, limit: int = 100, cursor: str = ""
) -> Call[answers.Page[answers.DeliveryRecord]]:
    """One page of the log of a webhook's deliveries, newest first."""
    answer = answers.Page[answers.DeliveryRecord]
    return Call("GET", webhook_path(webhook_id, "/deliveries"), answer, _page(limit, cursor))


def webhook_path(webhook_id: str, tail: str = "") -> str:
    """A webhook's address.

    Raises:
        NotFound: the id cannot stand in an address.
    """
    if webhook_id in ("", ".", "..") or "/" in webhook_id:
        raise NotFound(
            "webhook.unknown",
            f"{webhook_id!r} cannot name a webhook.",
            "`distribai webhook list` shows their ids.",
        )
    return f"/api/v1/webhooks/{quote(webhook_id, safe='')}{tail}"


def _finite(value: float, what: str, hint: str) -> None:
    if not math.isfinite(value):
        raise UsageError("usage.invalid", f"The {what} is {value}.", hint, field=what)
