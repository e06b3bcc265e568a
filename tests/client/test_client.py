"""The client against the served interface."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest

from distribai import errors
from distribai.api import answers
from distribai.client import AsyncClient, Client, calls
from distribai.client.problems import error_of
from distribai.core.spec import BlobRef
from distribai.errors import DistribAIError
from distribai.orchestrator.http.bodies import MAX_BODY
from tests.http.stand_in import OPERATOR, Orchestrator, log_record, node_record, running, spec


def test_a_job_goes_through_its_life(client: Client) -> None:
    made = client.create_job(spec())
    assert made.state == "submitted"
    assert client.accept("my-model").state == "queued"
    assert client.cancel(made.id, "enough").state == "cancelled"
    job = client.job(made.id)
    assert (job.reason, job.spec) == ("enough", spec())
    assert [e.kind for e in client.events(made.id)] == [
        "job.submitted",
        "job.queued",
        "job.cancelled",
    ]


def test_a_body_that_is_too_large_is_answered_and_not_cut_off(url: str) -> None:
    """By a client that reads nothing before it has sent everything, as many do."""
    headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/json"}
    with closing(HTTPConnection(url.removeprefix("http://"))) as http:
        for _ in range(3):
            http.request("POST", "/api/v1/jobs", b" " * (3 * MAX_BODY), headers)
            large = http.getresponse()
            problem = json.load(large)
            assert large.headers["content-type"] == "application/problem+json"
            assert (large.status, problem["code"]) == (413, "http.too_large")
            assert "/api/v1/blobs" in problem["hint"]


def test_every_call_reads_its_answer(client: Client, rooms: Orchestrator) -> None:
    job_id = client.create_job(spec(), "key").id
    assert client.create_job(spec(), "key").id == job_id
    rooms.jobs[job_id] = running(rooms.jobs[job_id])
    rooms.weights[job_id] = [BlobRef("ab" * 32, 9)]
    rooms.logs, rooms.nodes = [log_record(1, "hello")], [node_record("a")]
    assert client.pause(job_id).state == "paused"
    assert client.resume(job_id).state == "running"
    progress = client.job(job_id).round
    assert progress is not None
    assert progress.slots == 3
    assert client.rounds(job_id)[0].members[0].node_id == "node_a"
    assert client.versions(job_id)[0].weights == BlobRef("ab" * 32, 9)
    assert client.generate(job_id, "def ", max_tokens=3).text == "def /0/3/0.8/0"
    assert next(client.tasks(job_id)).samples == [{"start": 0, "stop": 8}]
    assert client.logs(job_id)[0].message == "hello"
    assert client.logs(job_id, after="1") == []
    assert client.nodes()[0].devices[0].threads == 2
    assert client.health().ok
    assert client.plan(spec()).plan["rounds"] == 20
    other = client.create_job(spec("other")).id
    assert client.decline(other, "no").state == "declined"


def test_lists_are_read_page_by_page(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_at_a_time(
        state: str | None = None, limit: int = 100, cursor: str = ""
    ) -> calls.Call[answers.Page[answers.JobSummary]]:
        return original(state, 2, cursor)

    original = calls.jobs
    monkeypatch.setattr(calls, "jobs", two_at_a_time)
    made = [client.create_job(spec(f"job-{n}")).id for n in range(5)]
    assert [j.id for j in client.jobs()] == made[::-1]
    assert list(client.jobs("running")) == []


def health_as(url: str, token: str) -> answers.GridSummary:
    with Client(url, token) as client:
        return client.health()


@pytest.mark.parametrize(
    ("provoke", "kind", "code"),
    [
        (lambda c: c.job("nothing"), errors.NotFound, "job.unknown"),
        (lambda c: c.job("a b?c#d%2F"), errors.NotFound, "job.unknown"),
        (lambda c: c.job("a/b"), errors.NotFound, "job.unknown"),
        (lambda c: c.job(""), errors.NotFound, "job.unknown"),
        (lambda c: c.plan(spec(batch=1 << 16)) and c.events("x"), errors.NotFound, "job.unknown"),
        (lambda c: list(c.jobs("sleeping")), errors.InvalidSpec, "usage.invalid"),
        (lambda c: health_as(c.url, "forged"), errors.Unauthenticated, "auth.invalid"),
        (lambda c: health_as(c.url, ""), errors.Unauthenticated, "auth.missing"),
    ],
)
def test_failures_are_the_orchestrator_s_own(
    client: Client, provoke: Callable[[Client], object], kind: type[DistribAIError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        provoke(client)
    assert caught.value.code == code


def test_nobody_there_is_said_with_what_to_try() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url) as client, pytest.raises(errors.Unavailable) as caught:
            client.health()
    assert caught.value.code == "grid.unreachable"
    assert "orchestrator start" in caught.value.hint
    assert "DISTRIBAI_URL" in caught.value.hint


@pytest.mark.parametrize("url", ["", "127.0.0.1:8766", "ftp://x", "http://", "http://a:b:c"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        Client(url)
    assert caught.value.code == "config.invalid"


@pytest.mark.parametrize("token", ["a b", "a\nb", "ä"])
def test_a_token_that_is_none_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        Client("http://127.0.0.1:1", token)
    assert token not in caught.value.message


async def test_the_awaited_client_makes_the_same_calls(url: str) -> None:
    async with AsyncClient(url, OPERATOR) as client:
        made = await client.send(calls.create_job(spec(), "k"))
        assert (await client.send(calls.job("my-model"))).id == made.id
        with pytest.raises(errors.NotFound):
            await client.send(calls.job("nothing"))


def answer(status: int, body: bytes | dict[str, object]) -> httpx.Response:
    request = httpx.Request("GET", "http://grid/x")
    if isinstance(body, bytes):
        return httpx.Response(status, content=body, request=request)
    return httpx.Response(status, json={"status": status, **body}, request=request)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (409, "job.ambiguous", errors.Ambiguous),
        (409, "blob.offset", errors.Conflict),
        (409, "job.state", errors.Conflict),
        (422, "blob.hash", errors.Integrity),
        (422, "tensor.manifest", errors.Integrity),
        (422, "data.not_utf8", errors.InvalidData),
        (422, "spec.steps", errors.InvalidSpec),
        (403, "auth.forbidden", errors.NotAllowed),
        (426, "protocol.version", errors.ProtocolMismatch),
        (500, "internal.fault", errors.InternalFault),
        (503, "task.timeout", errors.Unavailable),
    ],
)
def test_each_code_comes_back_as_its_class(
    status: int, code: str, kind: type[DistribAIError]
) -> None:
    error = error_of(answer(status, {"code": code, "detail": "d", "hint": "h", "field": "f"}))
    assert type(error) is kind
    assert (error.code, error.hint, error.field) == (code, "h", "f")


def test_a_code_of_a_newer_orchestrator_is_kept_in_the_message() -> None:
    error = error_of(answer(409, {"code": "moon.full", "detail": "Not tonight."}))
    assert error.code == "job.state"
    assert error.message == "Not tonight. (moon.full)"


def test_an_answer_of_something_else_is_said() -> None:
    assert error_of(answer(502, b"<html>")).code == "grid.unreachable"
    assert "DISTRIBAI_URL" in error_of(answer(404, b"<html>")).hint


def test_an_answer_in_another_form_is_a_version_that_does_not_fit() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"moon": 1}))
    client = Client("http://grid", transport=transport)
    with client, pytest.raises(errors.ProtocolMismatch) as caught:
        client.health()
    assert caught.value.code == "protocol.version"
