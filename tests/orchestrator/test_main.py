from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import asyncpg
import httpx
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from grpc import aio
from sqlalchemy import make_url

from distribai.errors import Conflict, UsageError
from distribai.orchestrator import duties
from distribai.orchestrator.addresses import public_host
from distribai.orchestrator.fleet.queries import summary
from distribai.orchestrator.main import Orchestrator, run_orchestrator
from distribai.orchestrator.webhooks.commands import create_webhook
from distribai.orchestrator.webhooks.keys import WEBHOOK_KEY
from distribai.sections import OrchestratorSettings
from distribai.store.statements import records
from distribai.wire import joinlink, signing
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import NodeServiceStub
from tests.node.helpers import eventually


def settings(directory: Path, **changes: object) -> OrchestratorSettings:
    return OrchestratorSettings(state_dir=directory, grpc_port=0, http_port=0, **changes)  # type: ignore[arg-type]


async def test_it_starts_serves_and_leaves_its_join_link_unchanged(tmp_path: Path) -> None:
    links, tokens = [], []
    for start in range(3):
        orchestrator = Orchestrator(settings(tmp_path))
        await orchestrator.start()
        async with httpx.AsyncClient(base_url=f"http://{orchestrator.http_address}") as client:
            assert (await client.get("/healthz")).status_code == 200
        links.append(joinlink.parse(orchestrator.join_link))
        tokens.append(orchestrator.operator_token)
        if start == 1:
            orchestrator.told()
        await orchestrator.stop()
        await orchestrator.stop()
    assert links[0].invite == links[1].invite
    assert links[0].grid == links[1].grid
    assert links[0].grpc.startswith("127.0.0.1:")
    assert tokens[0]
    assert tokens == [tokens[0], tokens[0], ""], "until somebody was told"
    assert (tmp_path / "invite").stat().st_mode & 0o077 == 0


async def test_it_stops_in_order_while_its_database_is_away(tmp_path: Path, postgres: str) -> None:
    others = await asyncpg.connect(postgres)
    await others.execute("CREATE DATABASE leaving")
    url = make_url(postgres).set(database="leaving").render_as_string(hide_password=False)
    orchestrator = Orchestrator(settings(tmp_path, db=url))
    await orchestrator.start()
    await others.execute("ALTER DATABASE leaving ALLOW_CONNECTIONS false")
    await others.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'leaving'"
    )
    await orchestrator.stop()
    await others.execute("DROP DATABASE leaving WITH (FORCE)")
    await others.close()


async def test_the_operators_token_opens_the_interface_and_no_other_does(tmp_path: Path) -> None:
    orchestrator = Orchestrator(settings(tmp_path))
    await orchestrator.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{orchestrator.http_address}") as client:
            answers = [
                await client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {token}"})
                for token in (orchestrator.operator_token, "dop_guessed")
            ]
        assert [a.status_code for a in answers] == [200, 401]
    finally:
        await orchestrator.stop()


async def test_a_node_joins_over_a_real_stream_and_is_told_when_the_grid_stops(
    tmp_path: Path,
) -> None:
    orchestrator = Orchestrator(settings(tmp_path))
    await orchestrator.start()
    link = joinlink.parse(orchestrator.join_link)
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    async with aio.insecure_channel(link.grpc) as channel:
        # Generated code has no types.
        stream = NodeServiceStub(channel).Session()  # type: ignore[no-untyped-call]
        challenge = (await stream.read()).challenge
        assert challenge.grid_id == link.grid
        register = pb.RegisterSession(
            protocol=1,
            public_key=key.public_key().public_bytes_raw(),
            signature=signing.sign_register(key, challenge.grid_id, challenge.nonce),
            invite=link.invite,
            devices=[pb.Device(index=0, type="cpu")],
        )
        await stream.write(pb.NodeMessage(register=register))
        ack = (await stream.read()).register_ack
        assert ack.node_id.startswith("node_")
        stopping = asyncio.create_task(orchestrator.stop())
        end = (await stream.read()).session_end
        assert end.retry
        await stopping


async def test_a_second_orchestrator_on_one_file_is_refused(tmp_path: Path) -> None:
    first = Orchestrator(settings(tmp_path))
    await first.start()
    try:
        with pytest.raises(Conflict) as caught:
            await Orchestrator(settings(tmp_path)).start()
        assert caught.value.code == "grid.locked"
    finally:
        await first.stop()


async def test_a_replica_without_the_webhooks_key_says_so_when_it_starts(tmp_path: Path) -> None:
    orchestrator = Orchestrator(settings(tmp_path))
    await orchestrator.start()
    await create_webhook(orchestrator.grid, "https://hooks.example/", (), "operator")
    await orchestrator.stop()
    (tmp_path / WEBHOOK_KEY).rename(tmp_path / "elsewhere")
    again = Orchestrator(settings(tmp_path))
    with structlog.testing.capture_logs() as said:
        await again.start()
    await again.stop()
    (line,) = [s for s in said if s["event"] == "webhook.key"]
    assert line["log_level"] == "warning"
    assert str(tmp_path / WEBHOOK_KEY) in line["problem"]
    assert not (tmp_path / WEBHOOK_KEY).exists(), "it makes no other one"


@pytest.mark.parametrize("which", ["grpc_port", "http_port"])
async def test_a_port_in_use_is_named_and_nothing_is_left_running(
    tmp_path: Path, which: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"grpc_port": 0, "http_port": 0, which: taken.getsockname()[1]}
        orchestrator = Orchestrator(OrchestratorSettings(state_dir=tmp_path, **ports))
        with pytest.raises(Conflict) as caught:
            await orchestrator.start()
    assert caught.value.code == "grid.port"
    assert capfd.readouterr().err == "", "no library has said it first, in words of its own"
    assert str(ports[which]) in caught.value.message
    again = Orchestrator(settings(tmp_path))
    await again.start()
    await again.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"tls": True, "insecure": True},
        {"tls_cert": "c.pem", "tls_key": "k.pem", "insecure": True},
        {"tls_cert": "c.pem"},
        {"public_http": "grid.example"},
    ],
)
async def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(UsageError) as caught:
        await Orchestrator(settings(tmp_path, **changes)).start()
    assert caught.value.code == "config.invalid"
    assert "secure.md" in caught.value.hint


def test_a_wildcard_becomes_an_address_that_others_can_reach() -> None:
    assert public_host("127.0.0.1") == "127.0.0.1"
    assert public_host("grid.example") == "grid.example"
    assert public_host("0.0.0.0") != "0.0.0.0"


def test_a_signal_stops_it_with_status_0(tmp_path: Path) -> None:
    seen: list[str] = []

    def on_ready(orchestrator: Orchestrator) -> None:
        seen.append(orchestrator.http_address)
        os.kill(os.getpid(), 15)

    assert run_orchestrator(settings(tmp_path), on_ready) == 0
    assert seen


async def test_a_store_that_has_nothing_of_the_grid_is_refused(tmp_path: Path) -> None:
    orchestrator = Orchestrator(settings(tmp_path))
    await orchestrator.start()
    refs = [await orchestrator.grid.blobs.put_bytes(b"weights" * n) for n in (1, 2)]
    async with orchestrator.grid.db.write() as tx:
        for ref in refs:
            await records.add_blob(tx, ref, "weights")
    await orchestrator.stop()
    elsewhere = Orchestrator(settings(tmp_path, blobs=str(tmp_path / "forgotten")))
    with pytest.raises(Conflict) as caught:
        await elsewhere.start()
    assert caught.value.code == "grid.blobs"
    assert str(tmp_path / "forgotten") in caught.value.message
    (tmp_path / "blobs" / "sha256" / refs[0].sha256[:2] / refs[0].sha256).unlink()
    again = Orchestrator(settings(tmp_path))
    await again.start()  # one that is lost is its job's matter
    await again.stop()


async def test_a_duty_that_cannot_go_on_is_a_problem_of_the_grid_s_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = [True]

    async def merge(_: object) -> tuple[bool, None]:
        if away[0]:
            raise OSError(28, "No space left on device")
        return False, None

    monkeypatch.setattr(duties, "merge_all", merge)
    orchestrator = Orchestrator(settings(tmp_path))
    await orchestrator.start()
    grid = orchestrator.grid
    await eventually(lambda: "merge" in grid.troubles)
    (problem,) = (await summary(grid)).problems
    assert "merge" in problem
    assert "No space left on device" in problem
    away[0] = False
    grid.wake.set()
    await eventually(lambda: not grid.troubles)
    assert (await summary(grid)).problems == ()
    await orchestrator.stop()
