"""What lies in deploy/ says what this program understands: command lines, settings, names."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import BoundArguments
from pathlib import Path
from typing import Any

import pytest
import yaml

from distribai import config
from distribai.cli.main import app
from distribai.orchestrator import addresses
from distribai.store.engine import Database
from distribai.store.presigning import presigner

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
OURS = "DISTRIBAI_"

OTHERS = {
    "PGPASSWORD",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
}
"""Variables that libraries of the program read: asyncpg and obstore."""

SECRETS = re.compile(r"PASSWORD|SECRET|MC_HOST")


def understand(words: list[str]) -> BoundArguments:
    """What the program makes of a command line; fails if it would not take it."""
    command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False, verbose=False)
    assert callable(command)
    return bound


def settings(env: Mapping[str, str], tmp_path: Path) -> config.Settings:
    """The program's own reading of variables."""
    found = {"DISTRIBAI_HOME": str(tmp_path), **env}
    return config.load(env=found, directory=tmp_path)


# ------------------------------------------------------------------ compose


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def ours(compose: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, service in compose["services"].items():
        if service.get("image") == "distribai":
            yield name, service


def filled(text: str) -> str:
    """With the variables of env.example."""
    example = (DEPLOY / "env.example").read_text()
    known = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", example, re.MULTILINE))

    def value(found: re.Match[str]) -> str:
        assert found[1] in known, f"env.example does not name {found[1]}"
        return known[found[1]] or "chosen"

    return re.sub(r"\$\{([A-Z0-9_]+)(?::\?[^}]*)?\}", value, text)


def test_every_replica_is_started_as_the_program_understands(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    replicas = dict(ours(compose))
    assert len(replicas) == 3
    for name, service in replicas.items():
        bound = understand(service["command"])
        env = {k: filled(str(v)) for k, v in service["environment"].items()}
        known = settings({k: v for k, v in env.items() if k.startswith(OURS)}, tmp_path)
        assert {k for k in env if not k.startswith(OURS)} <= OTHERS, name
        found = known.orchestrator()
        addresses.check(found)
        assert addresses.has_tls(replace(found, host=bound.arguments["host"]))
        assert Database(found.database_url).dialect == "postgresql"
        assert presigner(found.blob_place, found.presign, found.public_blobs) is None


def test_replicas_share_their_keys_and_nothing_else_of_the_state(compose: dict[str, Any]) -> None:
    volumes = [set(service["volumes"]) for _, service in ours(compose)]
    assert set.intersection(*volumes) == {"keys:/keys"}
    assert len(set.union(*volumes)) == 4
    named = {v.split(":")[0] for s in compose["services"].values() for v in s.get("volumes", [])}
    assert {v for v in named if not v.startswith(".")} == set(compose["volumes"])


def test_what_a_service_waits_for_is_there_and_can_become_healthy(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        wanted = service.get("depends_on", {})
        conditions = wanted if isinstance(wanted, dict) else {}
        for other in wanted:
            assert other in services, name
            if conditions.get(other, {}).get("condition") == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for {other}"


def test_no_secret_is_written_into_a_file(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            if SECRETS.search(variable):
                assert re.search(r"\$\{[A-Z0-9_]+:\?", str(value)), f"{name} {variable}"
    example = (DEPLOY / "env.example").read_text()
    assert re.findall(r"^(?:POSTGRES_PASSWORD|S3_SECRET)=(.+)$", example, re.MULTILINE) == []
    ignored = (ROOT / ".gitignore").read_text().split()
    assert "/deploy/.env" in ignored


def test_the_proxy_leads_to_the_replicas_by_the_ports_that_they_listen_on(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    text = (DEPLOY / "haproxy.cfg").read_text()
    defaults = settings({}, tmp_path).orchestrator()
    ports = {defaults.grpc_port, defaults.http_port}
    servers = re.findall(r"^\s+server (\S+) (\S+):(\d+)$", text, re.MULTILINE)
    assert {(s, h) for s, h, _ in servers} == {(n, n) for n, _ in ours(compose)}
    for port in ports:
        assert sum(int(p) == port for *_, p in servers) == 3
    binds = {int(p) for p in re.findall(r"^\s+bind :(\d+)$", text, re.MULTILINE)}
    published = {int(p.split(":")[0]) for p in compose["services"]["proxy"]["ports"]}
    assert binds == published == ports
    backends = set(re.findall(r"^backend (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"default_backend (\S+)", text)) == backends
    assert f"port {defaults.http_port}" in text


def test_the_image_is_made_of_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    assert 'ENTRYPOINT ["distribai"]' in text
    (command,) = re.findall(r"^CMD (\[.+\])$", text, re.MULTILINE)
    understand(yaml.safe_load(command))
    exposed = re.findall(r"^EXPOSE (.+)$", text, re.MULTILINE)
    assert exposed == ["50051 8766"]


# ------------------------------------------------------------------ systemd


def lines(unit: Path, key: str) -> list[str]:
    found = re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)
    return [str(value) for value in found]


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_a_unit_starts_what_the_program_understands(unit: Path, tmp_path: Path) -> None:
    env = dict(word.split("=", 1) for line in lines(unit, "Environment") for word in [line])
    settings({k: v for k, v in env.items() if k != "DISTRIBAI_HOME"}, tmp_path)
    started = lines(unit, "ExecStart")
    assert len(started) == (0 if unit.suffix == ".timer" else 1)
    for line in started:
        program, *words = shlex.split(line)
        assert program == "/opt/distribai/bin/distribai"
        understand(words)
    if unit.suffix == ".service":
        assert lines(unit, "User") != ["root"]
        assert lines(unit, "NoNewPrivileges") == ["yes"]


def test_a_node_has_the_time_that_it_takes_to_hand_in_what_it_did() -> None:
    node = DEPLOY / "systemd" / "distribai-node.service"
    assert lines(node, "KillMode") == ["mixed"], "its training is not to be told to stop, too"
    assert int(lines(node, "TimeoutStopSec")[0]) >= 90, "docs/how-to/machines.md: within 80 s"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units_and_finds_them_closed(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("distribai")
    for unit in UNITS:
        text = unit.read_text().replace("/opt/distribai/bin/distribai", str(program))
        (tmp_path / unit.name).write_text(text)
    names = [str(tmp_path / unit.name) for unit in UNITS]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name, most in (("distribai-orchestrator", 1.5), ("distribai-node", 4.5)):
        done = subprocess.run(
            [
                *("systemd-analyze", "security", "--offline=yes", "--no-pager"),
                *(f"--threshold={most * 10:.0f}", str(tmp_path / f"{name}.service")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout.splitlines()[-1:]
