"""Webhooks from the outbox to a receiver on the loopback, on both databases."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from distribai.core.addresses import parse_target, public_only
from distribai.core.webhooks import MAX_REFUSALS, secret_of
from distribai.errors import Conflict, NotFound, Unavailable, UsageError
from distribai.orchestrator import events
from distribai.orchestrator.fleet.queries import summary
from distribai.orchestrator.idempotency import Key
from distribai.orchestrator.webhooks import commands, duties, queries, sending
from distribai.orchestrator.webhooks.duties import Deliverer
from distribai.orchestrator.webhooks.keys import WEBHOOK_KEY, key_of, key_path
from distribai.sections import OrchestratorSettings
from distribai.store import outbox
from tests.orchestrator.harness import World
from tests.orchestrator.receiver import Receiver, answer, reaching


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await made.listen()
    yield made
    server.close()
    await server.wait_closed()


class Hooked:
    """A world with one webhook, and the hands of the duty."""

    def __init__(self, world: World, receiver: Receiver) -> None:
        self.world, self.grid, self.receiver = world, world.grid, receiver
        self.duty = Deliverer(world.grid, reaching(receiver, world.time))
        self.id = self.secret = ""

    async def make(self, *kinds: str) -> Hooked:
        # The name is checked at the door like any other; the port is the test's own.
        url = "http://hooks.example/x"
        self.id, self.secret = await commands.create_webhook(self.grid, url, kinds, "operator")
        async with self.grid.db.write() as tx:
            await tx.conn.exec_driver_sql(
                f"UPDATE webhooks SET url = 'http://hooks.example:{self.receiver.port}/x'"
            )
        return self

    async def happens(self, *kinds: str, job: str = "") -> None:
        async with self.grid.db.write() as tx:
            for kind in kinds:
                await outbox.append(tx, [outbox.Change(kind, job, data={"n": 1})])

    async def settle(self) -> None:
        for _ in range(50):
            if not await self.duty.look():
                return
        raise AssertionError("the duty does not come to rest")

    async def record(self) -> queries.WebhookRecord:
        return await queries.show_webhook(self.grid, self.id)

    async def log(self) -> list[queries.DeliveryRecord]:
        return list((await queries.list_deliveries(self.grid, self.id, 100)).items)[::-1]


@pytest.fixture
async def hooked(world: World, receiver: Receiver) -> Hooked:
    return Hooked(world, receiver)


@pytest.fixture
async def any_hooked(any_world: World, receiver: Receiver) -> Hooked:
    """On either database."""
    return Hooked(any_world, receiver)


async def test_events_arrive_in_order_signed_and_filtered(any_hooked: Hooked) -> None:
    await any_hooked.make("job.*", "round.merged")
    await any_hooked.happens("job.queued", "task.leased", "round.open", "round.merged", job="job_1")
    await any_hooked.happens("job.completed", job="job_1")
    await any_hooked.settle()
    receiver = any_hooked.receiver
    assert receiver.kinds == ["job.queued", "round.merged", "job.completed"]
    head, body = receiver.heads[0], receiver.bodies[0]
    assert head[":"] == "POST /x HTTP/1.1"
    assert head["host"] == f"hooks.example:{receiver.port}"
    at, _, signed = head["x-distribai-signature"].removeprefix("t=").partition(",v1=")
    expected = hmac.new(any_hooked.secret.encode(), f"{at}.".encode() + body, hashlib.sha256)
    assert signed == expected.hexdigest()
    assert int(at) == int(any_hooked.world.time.now)
    log = await any_hooked.log()
    assert [d.state for d in log] == ["delivered"] * 3
    assert [h["x-distribai-delivery"] for h in receiver.heads] == [d.id for d in log]
    assert [e["cursor"] for e in receiver.events] == [d.cursor for d in log]


async def test_what_happened_before_a_webhook_is_not_delivered(hooked: Hooked) -> None:
    await hooked.happens("job.queued")
    await hooked.make()
    await hooked.settle()
    assert hooked.receiver.kinds == ["webhook.created"]


async def test_a_failing_receiver_is_asked_once_per_growing_pause_and_loses_nothing(
    any_hooked: Hooked,
) -> None:
    await any_hooked.make("job.*")
    any_hooked.receiver.answers = [answer(500), answer(503)]
    await any_hooked.happens("job.queued", "job.running")
    await any_hooked.settle()
    assert len(any_hooked.receiver.bodies) == 1
    failing = await any_hooked.record()
    assert (failing.failures, failing.queued) == (1, 2)
    assert 5.0 <= failing.next_at - any_hooked.world.time.now <= 5.5
    any_hooked.world.time.now += 5.6
    await any_hooked.settle()
    any_hooked.world.time.now += 6.0
    await any_hooked.settle()
    assert len(any_hooked.receiver.bodies) == 2, "the second pause is twice the first"
    any_hooked.world.time.now += 6.0
    await any_hooked.settle()
    assert any_hooked.receiver.kinds[-2:] == ["job.queued", "job.running"]
    again = await any_hooked.record()
    assert (again.failures, again.failing_since, again.queued) == (0, None, 0)
    assert [d.attempts for d in await any_hooked.log()] == [3, 1]


async def test_a_delivery_that_is_refused_too_often_gives_way_to_the_next(hooked: Hooked) -> None:
    await hooked.make("job.*")
    hooked.receiver.answers = [answer(422)] * MAX_REFUSALS
    await hooked.happens("job.queued", "job.running")
    for _ in range(MAX_REFUSALS + 1):
        await hooked.settle()
        hooked.world.time.now = (await hooked.record()).next_at + 1
    refused, taken = await hooked.log()
    assert (refused.state, refused.attempts, refused.status) == ("failed", MAX_REFUSALS, 422)
    assert (taken.state, taken.attempts) == ("delivered", 1)


async def test_a_webhook_that_fails_for_too_long_is_disabled_with_an_event(
    hooked: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "DISABLE_AFTER_S", 1800.0)
    await hooked.make("job.*")
    hooked.receiver.answers = [answer(500)] * 200
    await hooked.happens("job.queued", "job.running")
    began = hooked.world.time.now
    while (found := await hooked.record()).state == "active":
        hooked.world.time.now = max(hooked.world.time.now, found.next_at)
        await hooked.settle()
    assert 1800 <= hooked.world.time.now - began <= 4000
    assert "nothing was delivered for 0.5 hours" in found.reason
    assert [d.state for d in await hooked.log()] == ["failed", "failed"]
    assert len(hooked.receiver.bodies) < 15
    async with hooked.grid.db.read() as tx:
        rows = await outbox.read(tx, outbox.BEGINNING, 100, kinds=("webhook.*",))
    assert [r.kind for r in rows] == ["webhook.created", "webhook.disabled"]
    await commands.enable_webhook(hooked.grid, hooked.id, "operator")
    hooked.receiver.answers.clear()
    await hooked.happens("job.completed")
    await hooked.settle()
    assert hooked.receiver.kinds[-1] == "job.completed"
    assert (await hooked.record()).state == "active"


async def test_gone_is_taken_at_its_word(hooked: Hooked) -> None:
    await hooked.make("job.*")
    hooked.receiver.answers = [answer(410)]
    await hooked.happens("job.queued")
    await hooked.settle()
    found = await hooked.record()
    assert (found.state, found.queued) == ("disabled", 0)
    assert "410" in found.reason


async def test_two_processes_write_one_try_once(any_hooked: Hooked) -> None:
    await any_hooked.make("job.*")
    await any_hooked.happens("job.queued")
    other = Deliverer(any_hooked.grid, any_hooked.duty.sender)
    await asyncio.gather(any_hooked.duty.look(), other.look())
    await any_hooked.settle()
    (only,) = await any_hooked.log()
    assert (only.state, only.attempts) == ("delivered", 1)


async def test_a_full_queue_leaves_the_rest_in_the_outbox(
    hooked: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "MAX_QUEUED", 3)
    monkeypatch.setattr(duties, "PAGE", 2)
    await hooked.make("job.*")
    hooked.receiver.answers = [answer(500)]
    await hooked.happens(*["job.queued"] * 7)
    await hooked.settle()
    assert (await hooked.record()).queued == 2
    hooked.world.time.now += 6
    await hooked.settle()
    assert len(await hooked.log()) == 7
    assert (await hooked.record()).queued == 0


async def test_the_log_keeps_the_newest(
    any_hooked: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "KEPT", 2)
    await any_hooked.make("job.*")
    await any_hooked.happens("job.a", "job.b", "job.c", "job.d")
    await any_hooked.settle()
    assert [d.kind for d in await any_hooked.log()] == ["job.c", "job.d"]


async def test_a_test_is_sent_at_once_and_told(any_hooked: Hooked) -> None:
    await any_hooked.make("job.*")
    sender = any_hooked.duty.sender
    taken = await commands.try_webhook(any_hooked.grid, any_hooked.id, "operator", sender)
    assert (taken.state, taken.status, taken.attempts) == ("delivered", 204, 1)
    any_hooked.receiver.answers = [answer(404)]
    failed = await commands.try_webhook(any_hooked.grid, any_hooked.id, "operator", sender)
    assert (failed.state, failed.status) == ("failed", 404)
    assert any_hooked.receiver.kinds == ["webhook.test", "webhook.test"]
    page = await queries.list_deliveries(any_hooked.grid, any_hooked.id, 1)
    assert page.items == (failed,)
    rest = await queries.list_deliveries(any_hooked.grid, any_hooked.id, 1, page.next_cursor)
    assert (rest.items, rest.next_cursor) == ((taken,), "")
    assert (await any_hooked.record()).failures == 0


async def test_the_same_key_makes_one_webhook_and_tells_the_same_secret(any_hooked: Hooked) -> None:
    def make(url: str, fingerprint: str) -> object:
        key = Key("operator", "webhooks", "k", fingerprint)
        return commands.create_webhook(any_hooked.grid, url, (), "operator", key)

    first, second, third = await asyncio.gather(
        *(make("https://a.example/", "f") for _ in range(3))  # type: ignore[arg-type]
    )
    assert first == second == third
    assert len((await queries.list_webhooks(any_hooked.grid, 10)).items) == 1
    with pytest.raises(Conflict) as caught:
        await make("https://b.example/", "g")  # type: ignore[misc]
    assert caught.value.code == "http.idempotency"


async def test_the_database_holds_no_secret_and_the_key_s_file_is_the_owner_s_alone(
    hooked: Hooked,
) -> None:
    await hooked.make()
    path = hooked.world.root / WEBHOOK_KEY
    assert os.name != "posix" or path.stat().st_mode & 0o777 == 0o600
    assert hooked.secret == secret_of(key_of(hooked.grid), hooked.id)
    async with hooked.grid.db.read() as tx:
        row = (await tx.conn.exec_driver_sql("SELECT * FROM webhooks")).one()
    stored = " ".join(map(str, row))
    assert hooked.secret.removeprefix("whsec_") not in stored
    assert path.read_text().strip() not in stored


async def test_a_process_with_another_key_leaves_webhooks_alone_and_says_so(
    hooked: Hooked,
) -> None:
    await hooked.make("job.*")
    path = hooked.world.root / WEBHOOK_KEY
    mine = path.read_text()
    await hooked.happens("job.queued")
    path.write_text("ab" * 32)
    await hooked.settle()
    assert hooked.receiver.bodies == []
    (said,) = [p for p in (await summary(hooked.grid)).problems if "another key" in p]
    assert str(path) in said
    with pytest.raises(Unavailable) as caught:
        await commands.create_webhook(hooked.grid, "https://b.example/", (), "operator")
    assert caught.value.code == "webhook.key", "nor does it sign with its own"
    assert len((await queries.list_webhooks(hooked.grid, 10)).items) == 1
    with pytest.raises(Unavailable) as caught:
        await commands.try_webhook(hooked.grid, hooked.id, "operator", hooked.duty.sender)
    assert caught.value.code == "webhook.key"
    path.unlink()
    with pytest.raises(Unavailable):
        await commands.create_webhook(hooked.grid, "https://b.example/", (), "operator")
    path.write_text(mine)
    await hooked.settle()
    assert hooked.receiver.kinds == ["job.queued"]


async def test_where_the_key_is_lost_and_all_webhooks_are_gone_another_one_begins(
    hooked: Hooked,
) -> None:
    await hooked.make()
    path = hooked.world.root / WEBHOOK_KEY
    path.write_text("ab" * 32)
    await commands.delete_webhook(hooked.grid, hooked.id, "operator")
    await hooked.make()
    assert hooked.secret == secret_of(bytes.fromhex("ab" * 32), hooked.id)


def test_replicas_have_their_key_from_the_directory_of_the_grid_s_keys(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    shared.mkdir()
    settings = OrchestratorSettings(state_dir=own)
    assert key_path(settings) == own / WEBHOOK_KEY
    settings = replace(settings, keys=str(shared))
    assert key_path(settings) == shared / WEBHOOK_KEY
    (own / WEBHOOK_KEY).write_text("earlier")
    assert key_path(settings) == own / WEBHOOK_KEY, "webhooks were made with it"
    (shared / WEBHOOK_KEY).write_text("copied")
    assert key_path(settings) == shared / WEBHOOK_KEY


async def test_a_deleted_webhook_is_gone_with_its_log(hooked: Hooked) -> None:
    await hooked.make()
    await hooked.settle()
    await commands.delete_webhook(hooked.grid, hooked.id, "operator")
    for gone in (
        queries.show_webhook(hooked.grid, hooked.id),
        queries.list_deliveries(hooked.grid, hooked.id, 10),
        commands.enable_webhook(hooked.grid, hooked.id, "operator"),
        commands.try_webhook(hooked.grid, "hook_\0", "operator", hooked.duty.sender),
    ):
        with pytest.raises(NotFound):
            await gone
    assert await hooked.duty.duty() == ""


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/", "https://[::1]/", "https://10.0.0.1/", "https://a.example:8443/"]
)
async def test_what_can_be_refused_at_the_door_is(world: World, url: str) -> None:
    with pytest.raises(UsageError) as caught:
        await commands.create_webhook(world.grid, url, (), "operator")
    assert caught.value.code == "webhook.url"


async def test_one_private_answer_of_a_name_refuses_all(receiver: Receiver) -> None:
    target = parse_target(f"http://hooks.example:{receiver.port}/")
    for found in (("127.0.0.1",), ("1.1.1.1", "::ffff:10.0.0.1"), ("1.1.1.1", "2002:7f00:1::")):
        sender = reaching(receiver, lambda: 0.0, lambda a, _: public_only(a, 80), found)
        told = await sender.post(target, {}, b"{}")
        assert told.reason.startswith("not sent:")
    assert receiver.bodies == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (answer(302, "Location: http://127.0.0.1/"), "no redirect is followed"),
        (answer(200, body=b"x" * 70_000), "more than 65536 bytes"),
        (answer(404), "answered 404"),
        (b"nonsense\r\n\r\n", "the connection failed"),
        (b"", "the connection failed"),
    ],
)
async def test_what_is_no_success_is_told(receiver: Receiver, said: bytes, reason: str) -> None:
    receiver.answers = [said]
    told = await reaching(receiver, lambda: 0.0).post(
        parse_target(f"http://hooks.example:{receiver.port}/"), {}, b"{}"
    )
    assert reason in told.reason
    assert len(receiver.bodies) == 1


async def test_a_receiver_that_does_not_answer_is_given_up(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.05)
    receiver.silent = True
    target = parse_target(f"http://hooks.example:{receiver.port}/")
    told = await reaching(receiver, lambda: 0.0).post(target, {}, b"{}")
    assert (told.status, told.ok) == (None, False)
    assert "no whole answer" in told.reason


async def test_proxies_of_the_environment_are_ignored(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    target = parse_target(f"http://hooks.example:{receiver.port}/")
    assert (await reaching(receiver, lambda: 0.0).post(target, {}, b"{}")).ok


async def test_tls_asks_for_the_name_and_verifies_it(tmp_path: Path) -> None:
    served, trusted = certificate(tmp_path, "hooks.example")
    receiver = Receiver()
    server = await receiver.listen(served)
    try:
        sender = reaching(receiver, lambda: 0.0, tls=lambda: trusted)
        right = await sender.post(
            parse_target(f"https://hooks.example:{receiver.port}/"), {}, b"{}"
        )
        assert right.ok, right.reason
        assert receiver.names == ["hooks.example"]
        wrong = await sender.post(
            parse_target(f"https://other.example:{receiver.port}/"), {}, b"{}"
        )
        assert "the connection failed" in wrong.reason
        assert len(receiver.bodies) == 1
    finally:
        server.close()
        await server.wait_closed()


async def test_a_name_that_nobody_knows_is_told(receiver: Receiver) -> None:
    async def nobody(host: str, port: int) -> list[object]:
        raise OSError(-2, "Name or service not known")

    sender = sending.Sender(lambda a, p: "", lambda: 0.0, nobody)  # type: ignore[arg-type]
    told = await sender.post(parse_target("https://nowhere.example/"), {}, b"{}")
    assert told.reason == "nowhere.example is not found: Name or service not known"


async def test_the_duty_of_a_process_delivers(hooked: Hooked) -> None:
    await hooked.make("job.*")
    duty = hooked.world.duties
    duty._deliverer.sender = hooked.duty.sender
    async with hooked.grid.db.write() as tx:
        await events.record(tx, "job.cancelled", job_id="job_1", data={"reason": "enough"})
    assert await duty.webhooks()
    while await duty.webhooks():
        pass
    assert hooked.receiver.kinds == ["job.cancelled"]


def certificate(root: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a fresh certificate, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain = root / "certificate.pem"
    chain.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(chain)
    return served, ssl.create_default_context(cafile=str(chain))
