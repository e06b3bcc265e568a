"""Settings: flag > DISTRIBAI_* > ./distribai.toml > user file > default; each value knows its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """Seconds of silence and of patience, all on database time (design.md sections 2 and 5)."""

    heartbeat_s: float = 10.0
    degraded_s: float = 30.0
    offline_s: float = 50.0
    startup_grace_s: float = 60.0
    tick_s: float = 5.0
    task_deadline_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """One orchestrator process.

    ``db`` is a SQLAlchemy URL; empty means ``<state_dir>/grid.sqlite3``. ``blobs`` is a directory
    or an object-store URL; empty means ``<state_dir>/blobs``. Port 0 takes any free port.
    """

    state_dir: Path
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8766
    db: str = ""
    blobs: str = ""
    insecure: bool = False
    max_parameters: int = 2_000_000_000
    max_blob_bytes: int = 64 * 2**30
    merge_threads: int = 0
    liveness: LivenessSettings = LivenessSettings()


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node daemon. ``threads`` 0 means all cores; ``device`` ``auto`` takes the best there is."""

    state_dir: Path
    join: str = ""
    name: str = ""
    device: str = "auto"
    threads: int = 0
    cache_bytes: int = 20 * 2**30
    share: float = 1.0
    progress_s: float = 2.0
