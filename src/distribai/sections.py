"""The one list of settings: name, type, default, help, bounds. ``config`` finds their values.

Each dataclass below is a section. ``[section]`` and ``name`` in a TOML file are
``DISTRIBAI_SECTION_NAME`` in the environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def _help(default: T, text: str) -> T:
    """A dataclass field with its help; what type checkers see is its default."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """Seconds of silence and of patience, all on database time."""

    heartbeat_s: float = _help(10.0, "seconds between a node's heartbeats")
    degraded_s: float = _help(30.0, "silence after which a node counts as degraded")
    offline_s: float = _help(50.0, "silence after which a node counts as offline")
    startup_grace_s: float = _help(60.0, "after a start no lease expires for so long")
    tick_s: float = _help(5.0, "the duties look for work at least so often")
    replica_s: float = _help(30.0, "after so long another replica does what a dead one had to do")
    task_deadline_s: float = _help(3600.0, "a task's lease ends after so long at the latest")


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """What webhooks may do. Without ``allow_private`` they reach public addresses only, on ports 80
    and 443; a grid that strangers can talk to should stay like that."""

    allow_private: bool = _help(
        False, "let webhooks go to private and loopback addresses too, on any port"
    )


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """How often one may ask: per second over a long time, and at once after a pause (``burst``). 0
    per second means no limit. A network is an IPv4 /24 or an IPv6 /48; this machine itself is none.
    """

    anonymous_per_s: float = _help(50.0, "requests of a network that bring no proven credentials")
    anonymous_burst: float = _help(1000.0, "of these, at once")
    network_per_s: float = _help(2000.0, "requests of a network with proven credentials")
    network_burst: float = _help(20_000.0, "of these, at once")
    owner_per_s: float = _help(400.0, "requests of one account or node")
    owner_burst: float = _help(4000.0, "of these, at once")
    key_per_s: float = _help(200.0, "requests with one key or token")
    key_burst: float = _help(2000.0, "of these, at once")
    joins_per_s: float = _help(50.0, "new streams of nodes from one network")
    joins_burst: float = _help(2000.0, "of these, at once")
    messages_per_s: float = _help(50.0, "messages on one node's stream; above it it is read slower")
    messages_burst: float = _help(1000.0, "of these, at once")
    connections: int = _help(
        4000, "open HTTP connections; at most half of the files that the process may open"
    )


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """One orchestrator process.

    ``db`` is a SQLAlchemy URL; empty means ``<state_dir>/grid.sqlite3``. ``blobs`` is a directory
    or an object-store URL; empty means ``<state_dir>/blobs``. ``presign`` ``auto`` lets nodes and
    clients fetch from a bucket itself where that is reached over https and not by a loopback
    address. Port 0 takes any free port. Beyond
    loopback TLS is the default: with the grid's own CA, which lies in ``keys``, or with the
    certificate in ``tls_cert`` and ``tls_key``. How to choose: docs/how-to/secure.md.
    """

    state_dir: Path = field(metadata={"help": "where the database, blobs and keys lie"})
    host: str = _help("127.0.0.1", "address to listen on")
    grpc_port: int = _help(50051, "port of the nodes' stream; 0 takes any free one")
    http_port: int = _help(8766, "port of the HTTP interface; 0 takes any free one")
    db: str = _help("", "SQLAlchemy URL; empty: SQLite in the state directory")
    blobs: str = _help("", "directory or s3://bucket/prefix; empty: in the state directory")
    presign: str = _help(
        "auto", "on: nodes fetch blobs from the bucket itself; auto: if it can be; or off"
    )
    public_blobs: str = _help(
        "", "https address by which others reach the object store; empty: as this process does"
    )
    tls: bool = _help(False, "TLS on loopback as well; beyond it, it is the default")
    insecure: bool = _help(
        False, "no TLS beyond loopback: a proxy has it, or the network is trusted"
    )
    tls_cert: str = _help(
        "", "your own certificate, a chain in PEM; empty: the grid's CA signs one"
    )
    tls_key: str = _help("", "the private key of tls_cert, in PEM")
    keys: str = _help(
        "", "directory of CA and webhooks.key, alike on all replicas; empty: state_dir"
    )
    public_grpc: str = _help("", "host:port by which nodes reach the stream; empty: as bound")
    public_http: str = _help("", "host:port by which others reach HTTP; empty: as bound")
    public_tls: bool = _help(False, "a proxy with a publicly trusted certificate stands in front")
    proxies: str = _help("127.0.0.1", "addresses whose X-Forwarded-For is believed; with commas")
    client_certificates: str = _help(
        "off", "required: nodes show a certificate of the grid's CA on their stream; or off"
    )
    certificate_s: float = _help(86400.0, "a node's certificate ends after so many seconds")
    mode: str = _help("", "trusted or open; empty: as it is, at the first start trusted")
    open_metrics: bool = _help(False, "let anybody read /metrics; else an operator's key does")
    max_parameters: int = _help(2_000_000_000, "largest model that a job may ask for")
    max_blob_bytes: int = _help(64 * 2**30, "largest single upload, in bytes")
    merge_threads: int = _help(0, "threads of the merge; 0: all cores")
    orphans_s: float = _help(
        172800.0, "a blob that nothing names is deleted after so many seconds; 0: never"
    )
    max_snapshots: int = _help(100, "snapshots that a job keeps by its cadence at most")
    let_go_s: float = _help(
        1800.0,
        "a snapshot that nothing needs any more is deleted after so many seconds; 0: all stay",
    )
    idempotency_s: float = _help(604800.0, "an idempotency key is forgotten after so many seconds")
    liveness: LivenessSettings = LivenessSettings()
    webhooks: WebhookSettings = WebhookSettings()
    limits: LimitSettings = LimitSettings()

    @property
    def asks_for_certificates(self) -> bool:
        """Whether nodes must show certificates of the grid's CA."""
        return self.client_certificates == "required"

    @property
    def database_file(self) -> Path:
        """Where the database lies unless ``db`` says otherwise."""
        return self.state_dir / "grid.sqlite3"

    @property
    def database_url(self) -> str:
        """The database's SQLAlchemy URL."""
        return self.db or f"sqlite:///{self.database_file}"

    @property
    def blob_place(self) -> str | Path:
        """The blobs' directory or object-store URL."""
        return self.blobs or self.state_dir / "blobs"


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node daemon. ``threads`` 0 means all cores; ``device`` ``auto`` takes the best one. Rates
    are 10^6 bits a second. A month is a calendar month of the machine's clock; its bytes are both
    directions together."""

    state_dir: Path = field(metadata={"help": "key and cache of this node; empty: a free one"})
    join: str = _help("", "the grid's join link")
    name: str = _help("", "what people see; empty: the machine's name")
    device: str = _help("auto", "auto, cpu, mps, cuda or cuda:N")
    threads: int = _help(0, "CPU threads for training; 0: all cores")
    cache_bytes: int = _help(20 * 2**30, "largest cache of blobs, in bytes")
    share: float = _help(1.0, "share of the device's time that training may take")
    up_mbps: float = _help(0.0, "how fast it may send, 10^6 bits a second; 0: as fast as it can")
    down_mbps: float = _help(0.0, "how fast it may fetch, 10^6 bits a second; 0: as fast as it can")
    month_bytes: int = _help(0, "bytes that it may move in a month, both ways; 0: no limit")
    progress_s: float = _help(2.0, "seconds between a task's progress reports at least")
    checkpoint_s: float = _help(
        15.0, "seconds between two checkpoints of a running task at least; 0: none"
    )
    checkpoint_bytes: int = _help(16 * 2**30, "largest checkpoint of a running task, in bytes")
    feedback_bytes: int = _help(
        16 * 2**30, "largest error feedback of all jobs together, in bytes; 0: none is kept"
    )
    benchmark: bool = _help(True, "measure the devices' speed at a quiet moment, for the scheduler")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What orchestrator and node write to stderr. ``format`` ``auto`` is ``console``, sentences for
    people, on a terminal, and ``json``, one document a line, elsewhere."""

    format: str = _help("auto", "auto, console or json")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where the command line finds the orchestrator, and as whom it speaks."""

    url: str = _help("http://127.0.0.1:8766", "address of the orchestrator's HTTP interface")
    token: str = _help("", "a key; empty: what `login` or `orchestrator start` left")
    ca: str = _help(
        "", "the grid's CA: a file in PEM, or its SHA-256; empty: the authorities of the system"
    )


SECTIONS: Mapping[str, type[Any]] = {
    "client": ClientSettings,
    "orchestrator": OrchestratorSettings,
    "node": NodeSettings,
    "liveness": LivenessSettings,
    "webhooks": WebhookSettings,
    "limits": LimitSettings,
    "logs": LogSettings,
}

BOUNDS: Mapping[str, tuple[float, float]] = {
    "orchestrator.grpc_port": (0, 65535),
    "orchestrator.http_port": (0, 65535),
    "orchestrator.max_parameters": (1, 10**13),
    "orchestrator.max_blob_bytes": (1, 2**50),
    "orchestrator.merge_threads": (0, 4096),
    "node.threads": (0, 4096),
    "node.cache_bytes": (2**20, 2**60),
    "node.share": (0.01, 1.0),
    "node.up_mbps": (0.0, 10**6),
    "node.down_mbps": (0.0, 10**6),
    "node.month_bytes": (0, 2**60),
    "node.progress_s": (0.0, 3600.0),
    "node.checkpoint_s": (0.0, 86400.0),
    "node.checkpoint_bytes": (0, 2**60),
    "node.feedback_bytes": (0, 2**60),
    "orchestrator.orphans_s": (0.0, 10**9),
    "orchestrator.max_snapshots": (1, 1000),
    "orchestrator.let_go_s": (0.0, 10**9),
    "orchestrator.idempotency_s": (3600.0, 10**9),
    "orchestrator.certificate_s": (1.0, 31 * 86400.0),
    "liveness.heartbeat_s": (0.05, 3600.0),
    "liveness.degraded_s": (0.1, 86400.0),
    "liveness.offline_s": (0.1, 86400.0),
    "liveness.startup_grace_s": (0.0, 86400.0),
    "liveness.tick_s": (0.05, 3600.0),
    "liveness.replica_s": (0.5, 3600.0),
    "liveness.task_deadline_s": (1.0, 10**7),
    **{
        f"limits.{field.name}": (1.0, 10**9) if field.name.endswith("_burst") else (0.0, 10**9)
        for field in dataclasses.fields(LimitSettings)
    },
}
"""Smallest and largest value of every numeric setting."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "logs.format": ("auto", "console", "json"),
    "orchestrator.client_certificates": ("off", "required"),
    "orchestrator.mode": ("", "trusted", "open"),
    "orchestrator.presign": ("auto", "on", "off"),
}
"""The values of settings that take some words only."""
