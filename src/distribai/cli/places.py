"""What the commands on a whole grid share: where it is, how far they are, what there is."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from distribai.cli import output

if TYPE_CHECKING:
    from distribai.config import Settings
    from distribai.orchestrator.backup import BackupManifest, Progress

LINE_S = 10.0
"""Seconds between lines of progress where nobody watches a terminal."""


@Parameter(name="*")
@dataclass(frozen=True)
class Place:
    """Where the grid is, as ``orchestrator start`` is told."""

    state_dir: Annotated[Path | None, Parameter(help="The orchestrator's state directory.")] = None
    db: Annotated[
        str | None, Parameter(help="SQLAlchemy URL.  [default: SQLite in the state directory]")
    ] = None
    blobs: Annotated[
        str | None,
        Parameter(help="Directory or s3://bucket/prefix.  [default: in the state directory]"),
    ] = None

    def settings(self) -> Settings:
        """All settings, with these."""
        from distribai import config

        return config.load(
            {
                "orchestrator.state_dir": self.state_dir,
                "orchestrator.db": self.db,
                "orchestrator.blobs": self.blobs,
            }
        )


def operator_token(settings: Settings) -> dict[str, str]:
    """The token that ``orchestrator start`` left for the commands, if it is this grid's: a restored
    grid tells it at its first start, or nobody could operate it on another machine."""
    from distribai.cli.connection import read_credentials

    found = read_credentials(settings.home)
    if found is None or found.state_dir != str(settings.orchestrator().state_dir):
        return {}
    return {"operator-token": f"{found.token}\n"}


def figures(manifest: BackupManifest) -> dict[str, object]:
    """What a grid is and how much of it there is, for JSON."""
    return {
        "grid_id": manifest.grid_id,
        "software": manifest.software,
        "revision": manifest.revision,
        "taken_at": manifest.taken_at,
        "rows": sum(part.lines for part in manifest.tables.values()),
        "jobs": manifest.tables["jobs"].lines,
        "versions": manifest.tables["versions"].lines,
        "blobs": manifest.blobs.lines,
        "blob_bytes": manifest.blob_bytes,
    }


def words_of(manifest: BackupManifest) -> str:
    """The same for people."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.taken_at))
    return (
        f"The grid {manifest.grid_id} as of {when} "
        f"({output.plural(manifest.tables['jobs'].lines, 'job')}, "
        f"{output.plural(manifest.tables['versions'].lines, 'version')}, "
        f"{output.plural(manifest.blobs.lines, 'blob')}, {output.size(manifest.blob_bytes)})"
    )


class Line:
    """Progress on stderr: one line that changes on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._next = time.monotonic() + (0.0 if self._live else LINE_S)
        self._open = False

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            sys.stderr.write("\n")

    def told(self, progress: Progress) -> None:
        """How far it is."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.2 if self._live else LINE_S)
        if progress.what == "rows":
            text = f"rows: {progress.done}" + (f" of {progress.total}" if progress.total else "")
        else:
            share = 100 * progress.done // max(progress.total, 1)
            text = f"{progress.what}: {share}% of {output.size(progress.total)}"
        if self._live:
            sys.stderr.write(f"\r{text:<60}")
            sys.stderr.flush()
            self._open = True
        else:
            output.note(text)
