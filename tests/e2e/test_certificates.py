"""A grid that asks its nodes for certificates, with real processes: join, train, renew, refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from distribai import tls
from distribai.client import Client
from distribai.testing import faults
from distribai.wire import joinlink
from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.v1.distribai_pb2_grpc import NodeServiceStub
from tests.e2e.harness import CAP_S, GridProcesses, wait_for

pytestmark = pytest.mark.e2e

ASKING = ("--client-certificates", "required")
LIFE_S = 12.0


def start_node(g: GridProcesses, name: str, link: str) -> None:
    g.nodes.append(
        g.spawn(
            name,
            *("node", "start", "--state-dir", str(g.root / name), "--name", name),
            *("--threads", "1", "--device", "cpu"),
            env={"DISTRIBAI_NODE_JOIN": link},
            command=faults.command("--pretend", "0.01", arguments=()),
        )
    )


def log_of(g: GridProcesses, name: str) -> str:
    return (g.root / f"{name}.log").read_text()


def knock(g: GridProcesses) -> None:
    """A stream of somebody who has the join link and no certificate."""
    link = joinlink.parse(g.ready["join_link"])
    name = (("grpc.ssl_target_name_override", tls.GRID_NAME),)
    with grpc.secure_channel(
        link.grpc, grpc.ssl_channel_credentials(g.ready["ca"].encode()), options=name
    ) as channel:
        next(NodeServiceStub(channel).Session(iter([pb.NodeMessage()]), timeout=CAP_S))


def test_nodes_join_train_and_renew_and_others_are_refused(tmp_path: Path) -> None:
    g = GridProcesses(tmp_path, {"DISTRIBAI_ORCHESTRATOR_CERTIFICATE_S": str(LIFE_S)})
    try:
        g.start_orchestrator(*ASKING)
        link = joinlink.parse(g.ready["join_link"])
        assert link.certificates
        start_node(g, "node0", g.ready["join_link"])
        start_node(g, "node1", str(replace(link, certificates=False)))  # an older link
        job = g.json(
            *("job", "create", "sealed", "20", "--inner-steps", "10", "--workers-min", "2"),
            *("--batch", "4", "--seq-len", "32"),
        )["id"]
        g.cli("job", "accept", job)
        wait_for("two versions", lambda: g.look(lambda c: c.job(job)).state == "completed")

        with pytest.raises(grpc.RpcError) as caught:
            knock(g)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]

        for name in ("node0", "node1"):
            wait_for(f"{name} renews", lambda name=name: log_of(g, name).count("certified") >= 3)

        # The certificate that they joined with has ended: what brings them back is another one.
        assert g.orchestrator is not None
        g.orchestrator.kill()
        g.orchestrator.wait()
        assert g.orchestrator.stdout is not None
        g.orchestrator.stdout.close()
        g.start_orchestrator(*ASKING)
        wait_for("both are back", lambda: g.look(Client.health).nodes_online == 2)

        banned = g.look(lambda c: next(n for n in c.nodes() if n.name == "node1"))
        g.cli("nodes", "ban", banned.id, "--why", "it lies")
        wait_for("it has left", lambda: g.nodes[1].poll() is not None)
        assert g.nodes[1].returncode == 4, "a service manager would start it again and again"
        told = g.cli("node", "status", "--state-dir", str(tmp_path / "node1"), check=0).stdout
        for words in ("has ended", "The grid's operator has banned this node: it lies.", "pardon"):
            assert words in told
        start_node(g, "node1", "")
        again = g.nodes[-1]
        wait_for("it is refused at once", lambda: again.poll() is not None)
        assert again.returncode == 4
        assert log_of(g, "node1").count("The grid's operator has banned this node: it lies.") == 2

        stranger = replace(link, invite="guessed")
        start_node(g, "stranger", str(stranger))
        wait_for("no certificate for a stranger", lambda: g.nodes[-1].poll() is not None)
        assert "node.invite" in log_of(g, "stranger")
    finally:
        stubborn = g.stop()
    assert not stubborn
    for log in tmp_path.glob("*.log"):
        assert link.invite not in log.read_text(), log.name
    for name in ("node0", "node1"):
        kept = [p for p in (tmp_path / name).rglob("*") if p.is_file()]
        assert (tmp_path / name / "node.key") in kept
        pems = [p for p in kept if b"PRIVATE KEY" in p.read_bytes()]
        assert pems == [tmp_path / name / "node.key"], "a certificate's key lies on the disk"
