"""A job over TLS, with real processes; and what these leave behind holds nobody's secrets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distribai.client import Client
from distribai.testing import faults
from distribai.tls import fingerprint
from distribai.wire import joinlink
from tests.e2e.harness import GridProcesses, wait_for

pytestmark = pytest.mark.e2e

JWT = re.compile(rb"eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.")


def key_text(path: Path) -> bytes:
    """The part of a PEM file that nobody else may ever see."""
    return b"".join(path.read_bytes().splitlines()[1:-1])[:40]


def test_two_versions_are_trained_over_tls_and_no_secret_is_left_in_sight(tmp_path: Path) -> None:
    g = GridProcesses(tmp_path, {"DISTRIBAI_DEBUG": "1"})
    try:
        g.start_orchestrator("--tls")
        link = joinlink.parse(g.ready["join_link"])
        assert link.ca == fingerprint(g.ready["ca"])
        for name in ("node0", "node1"):
            node = g.spawn(
                name,
                *("node", "start", "--state-dir", str(tmp_path / name), "--name", name),
                *("--threads", "1", "--device", "cpu"),
                env={"DISTRIBAI_NODE_JOIN": g.ready["join_link"]},
                command=faults.command("--pretend", "0.01", arguments=()),
            )
            g.nodes.append(node)
        job = g.json(
            *("job", "create", "tls", "20", "--inner-steps", "10", "--workers-min", "2"),
            *("--batch", "4", "--seq-len", "32"),
        )["id"]
        g.cli("job", "accept", job)
        wait_for("two versions", lambda: g.look(lambda c: c.job(job)).state == "completed")
        assert g.look(lambda c: c.job(job)).version == 2
        assert g.look(Client.health).nodes_online == 2

        g.env["DISTRIBAI_HOME"] = str(tmp_path / "elsewhere")
        remote = ["health", "--url", g.ready["url"], "--token", g.token]
        assert "code: grid.unreachable" in g.cli(*remote, check=8).stderr, "no word of the CA"
        g.cli(*remote, "--ca", link.ca, check=0)
        g.cli(*remote, "--ca", str(g.state / "ca-cert"), check=0)
        assert "code: grid.ca" in g.cli(*remote, "--ca", "0" * 64, check=6).stderr
    finally:
        stubborn = g.stop()
    assert not stubborn
    secrets = {
        "token": g.token.encode(),
        "invite": link.invite.encode(),
        "CA's key": key_text(g.state / "ca-key"),
        "node's key": key_text(tmp_path / "node0" / "node.key"),
    }
    places = [*tmp_path.glob("*.log"), *g.state.glob("grid.sqlite3*"), tmp_path / "node0" / "join"]
    assert len(places) >= 5
    for place in places:
        text = place.read_bytes()
        for name, secret in secrets.items():
            assert secret not in text, f"the {name} lies in {place}"
        assert not JWT.search(text), f"a node's token lies in {place}"
    for path in (g.state / "ca-key", g.state / "server-tls", tmp_path / "node0" / "node.key"):
        assert path.stat().st_mode & 0o077 == 0
